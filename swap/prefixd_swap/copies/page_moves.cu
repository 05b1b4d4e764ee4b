// Moves pages between an engine's KV cache and a packed buffer on the same device; `page_kernel.py` launches it.
//
// Unit u of the work is the page of run u / places at place u % places. A thread block takes every gridDim.x-th unit,
// its threads the elements of the page in turn, four at a time so that their loads overlap. A place with a negative id
// is left out. The compiled form is page_moves.ptx (`swap/compile_kernels.py`); the tests' stand-in for the driver
// includes this file, so it is C.

struct PageRun {
  unsigned long long address;  // of page 0
  unsigned long long stride;   // bytes from a page to the next one
  unsigned long long nbytes;   // of a page; a multiple of the element
  unsigned long long at;       // bytes of a packed part before the run
};

#define MOVE_PAGES(name, Element, GATHER)                                                                             \
  KERNEL void name(const struct PageRun *runs, const long long *ids, char *packed, unsigned long long part_bytes,     \
                   unsigned run_count, unsigned places, unsigned blocks) {                                            \
    for (unsigned long long u = blockIdx.x; u < (unsigned long long)run_count * places; u += gridDim.x) {             \
      const struct PageRun run = runs[u / places];                                                                    \
      const unsigned place = u % places;                                                                              \
      const long long id = ids[place];                                                                                \
      if (id < 0) continue;                                                                                           \
      Element *page = (Element *)(run.address + id * run.stride);                                                     \
      Element *part = (Element *)(packed + place / blocks * part_bytes + run.at + place % blocks * run.nbytes);       \
      const Element *__restrict__ from = GATHER ? page : part;                                                        \
      Element *__restrict__ to = GATHER ? part : page;                                                                \
      const unsigned long long n = run.nbytes / sizeof(Element), step = blockDim.x;                                   \
      unsigned long long i = threadIdx.x;                                                                             \
      for (; i + 3 * step < n; i += 4 * step) {                                                                       \
        const Element a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];                \
        to[i] = a;                                                                                                    \
        to[i + step] = b;                                                                                             \
        to[i + 2 * step] = c;                                                                                         \
        to[i + 3 * step] = d;                                                                                         \
      }                                                                                                               \
      for (; i < n; i += step) to[i] = from[i];                                                                       \
    }                                                                                                                 \
  }

#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif
MOVE_PAGES(gather_16, uint4, 1)
MOVE_PAGES(scatter_16, uint4, 0)
MOVE_PAGES(gather_4, unsigned, 1)
MOVE_PAGES(scatter_4, unsigned, 0)
MOVE_PAGES(gather_1, unsigned char, 1)
MOVE_PAGES(scatter_1, unsigned char, 0)
