// A kernel of page_moves.cu and the arguments of its launch; included by libcuda.c.
typedef struct { unsigned x, y, z, w; } uint4;
static __thread struct { unsigned x; } gridDim, blockDim, blockIdx, threadIdx;
#define KERNEL static
#include "../../../swap/prefixd_swap/copies/page_moves.cu"

typedef void Kernel(const struct PageRun *, const long long *, char *, unsigned long long, unsigned, unsigned, unsigned);
typedef struct {
  Kernel *kernel;
  const struct PageRun *runs;
  const long long *ids;
  char *packed;
  unsigned long long part_bytes;
  unsigned run_count, places, blocks, grid, threads;
} Launch;
