// The kernels of page_moves.cu on the host, with the checks that a device makes; included by libcuda.c.
static const struct { const char *name; Kernel *kernel; unsigned element; } kernels[] = {
  {"gather_16", gather_16, 16}, {"scatter_16", scatter_16, 16}, {"gather_4", gather_4, 4},
  {"scatter_4", scatter_4, 4}, {"gather_1", gather_1, 1}, {"scatter_1", scatter_1, 1}};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static int on_device(const void *at, size_t n) { return covered((uintptr_t)at, n, 1) == n; }
// Whether all that the kernel touches can be touched, at addresses that suit its element.
static int mapped(const Launch *l) {
  unsigned element = 1;
  for (int k = 0; k < KERNELS; k++) if (kernels[k].kernel == l->kernel) element = kernels[k].element;
  if (!on_device(l->runs, l->run_count * sizeof *l->runs) || !on_device(l->ids, l->places * sizeof *l->ids)) return 0;
  if (!on_device(l->packed, (l->places + l->blocks - 1) / l->blocks * l->part_bytes)) return 0;
  for (unsigned r = 0; r < l->run_count; r++)
    for (unsigned p = 0; p < l->places; p++) {
      const struct PageRun *run = &l->runs[r];
      uintptr_t page = run->address + l->ids[p] * run->stride;
      uintptr_t part = (uintptr_t)l->packed + p / l->blocks * l->part_bytes + run->at + p % l->blocks * run->nbytes;
      if (l->ids[p] < 0) continue;
      if (!on_device((void *)page, run->nbytes) || page % element || part % element || run->nbytes % element) return 0;
    }
  return 1;
}
static void compute(const Launch *l) {
  gridDim.x = l->grid;
  blockDim.x = l->threads;
  for (blockIdx.x = 0; blockIdx.x < l->grid; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < l->threads; threadIdx.x++)
      l->kernel(l->runs, l->ids, l->packed, l->part_bytes, l->run_count, l->places, l->blocks);
}
static Result module_load(void **module, const char *image) {
  NEEDS_CONTEXT;
  if (!strstr(image, ".target sm_")) return INVALID_IMAGE;
  *module = (void *)kernels;
  return OK;
}
static Result module_function(void **function, void *module, const char *name) {
  NEEDS_CONTEXT;
  if (module != kernels) return INVALID_HANDLE;
  for (int k = 0; k < KERNELS; k++) if (!strcmp(kernels[k].name, name)) { *function = kernels[k].kernel; return OK; }
  return NOT_FOUND;
}
