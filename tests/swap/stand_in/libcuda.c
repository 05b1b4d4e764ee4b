// A libcuda.so.1 for machines without a GPU: the part of the CUDA driver API that prefixd uses, on memfd and mmap.
//
//   gcc -O2 -Wall -Werror -shared -fPIC -pthread -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda.c
//
// It exists to refuse what the driver refuses: sizes that are not a multiple of the granularity, more memory than the
// device has, an offset into a chunk, a second mapping over a first one, unmapping anything but whole mappings (a run
// of them in one call is whole), freeing a reservation with mappings, touching memory without access, exporting what
// was not created exportable, a copy of host memory that is registered in part or by two calls, a handle or an event
// after its end, an event on a stream of another context, calls from a thread without a current context. An allocation
// counts against the device until every process has let go of it.
// Copies and the kernels of page_moves.cu run on a thread per stream, late on purpose, so that a missing wait shows as
// wrong bytes, and one that meets memory which was unmapped under it fails the context for good, as on a device. It
// proves calling conventions, not the behaviour or the speed of a driver.
//
// Environment, read at cuInit: PREFIXD_STAND_IN_MEMORY_BYTES, the memory of each device (default 1 GiB);
// PREFIXD_STAND_IN_DEVICES, how many there are (1 or 2, default 1); PREFIXD_STAND_IN_COPY_US, what each asynchronous
// copy waits before it runs (default 300); -1: copies, launches and waits return at once, unchecked, and nothing is
// copied, so that what is left of a copy's time is the caller's.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernel_launch.h"

// The types and values of cuda.h that cross the interface; the assertions pin their layout.
typedef int Result;
enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  ALREADY_MAPPED = 208, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
  HOST_MEMORY_ALREADY_REGISTERED = 712, HOST_MEMORY_NOT_REGISTERED = 713
};
enum { PINNED = 1, POSIX_FD = 1, ON_DEVICE = 1, READ_WRITE = 3 };
enum { ATTRIBUTE_VIRTUAL_MEMORY = 102, ATTRIBUTE_POSIX_FD = 103 };
typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;
_Static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12, "cuda.h's layout on x86-64 and arm64");

#define GRANULARITY (2ull << 20)
#define MAX_CHUNKS 16384
#define MAX_RANGES 1024
#define MAX_STREAMS 1024
#define MAX_PINNED 1024
#define MAX_DEVICES 2
#define MAX_PUSHED 16
#define ANY_DEVICE -1

// live: its handle is not released. gone: this process has let go of it, others may not have; see drop_if_unused.
typedef struct { int fd, live, mappings, exportable, imported, gone, device; size_t size; } Chunk;
typedef struct { uintptr_t base; size_t size; int chunk, accessible, used; } Mapping;
typedef struct { uintptr_t base; size_t size; int used; } Range;
typedef struct { size_t x, y; int type, pad; void *host; uintptr_t device; void *array; size_t pitch; } Plane;
typedef struct { Plane src, dst; size_t width, height; } Copy2D;
_Static_assert(sizeof(Copy2D) == 128, "CUDA_MEMCPY2D of cuda.h");
typedef struct Op {
  int kind;
  void *dst, *src;
  size_t n;  // of a row
  size_t rows, dst_pitch, src_pitch;
  struct Stream *other;
  uint64_t at;
  Launch launch;
  struct Op *next;
} Op;
typedef struct Context { int device; } Context;
typedef struct Stream {
  pthread_t thread;
  Op *head, *tail;
  uint64_t submitted, done;
  int live;
  Context *context;
} Stream;
typedef struct { Stream *stream; uint64_t at; Context *context; int live; } Event;  // kept after its end, to refuse it
enum { COPY_TO_HOST, COPY_TO_DEVICE, COPY_ON_DEVICE, WAIT, LAUNCH };
enum { HOST_MEMORY = 1, DEVICE_MEMORY = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int initialized, failed;  // failed: the sticky error of a context that has faulted
static Context contexts[MAX_DEVICES] = {{0}, {1}};
static __thread Context *pushed[MAX_PUSHED];  // a thread's contexts; the last one is current
static __thread int depth;
static Chunk chunks[MAX_CHUNKS];
static unsigned generations[MAX_CHUNKS];  // part of a handle, so that one that was released is never valid again
static Mapping mappings[MAX_CHUNKS];
static Range ranges[MAX_RANGES], pinned[MAX_PINNED];
static Stream streams[MAX_STREAMS];  // the first MAX_DEVICES are the default streams
static size_t chunk_bytes_live[MAX_DEVICES], capacity;
static int devices;
static long copy_us;

static long setting(const char *name, long fallback) {
  const char *value = getenv(name);
  return value ? atol(value) : fallback;
}
static Context *current_context(void) { return depth ? pushed[depth - 1] : NULL; }

#define LOCKED(expression) do { pthread_mutex_lock(&lock); Result r_ = (expression); pthread_mutex_unlock(&lock); \
                                return r_; } while (0)
#define NEEDS_CONTEXT do { if (!initialized) return NOT_INITIALIZED; if (!current_context()) return INVALID_CONTEXT; \
                           if (failed) return failed; } while (0)

static int overlaps(uintptr_t a, size_t n, uintptr_t b, size_t m) { return a < b + m && b < a + n; }
static int inside(uintptr_t a, size_t n, uintptr_t b, size_t m) { return a >= b && a + n <= b + m; }

static int reserved(uintptr_t base, size_t n) {
  for (int i = 0; i < MAX_RANGES; i++)
    if (ranges[i].used && inside(base, n, ranges[i].base, ranges[i].size)) return 1;
  return 0;
}
// How many bytes of [base, base + n) lie in whole mappings inside it (or, for a copy, in parts of accessible ones).
static size_t covered(uintptr_t base, size_t n, int for_copy) {
  size_t total = 0;
  for (int i = 0; i < MAX_CHUNKS; i++) {
    Mapping *m = &mappings[i];
    if (!m->used) continue;
    if (!for_copy && inside(m->base, m->size, base, n)) total += m->size;
    if (for_copy && m->accessible && overlaps(base, n, m->base, m->size)) {
      uintptr_t low = base > m->base ? base : m->base;
      uintptr_t high = base + n < m->base + m->size ? base + n : m->base + m->size;
      total += high - low;
    }
  }
  return total;
}
// A chunk's memory goes back when no process holds it: each descriptor and mapping of its file, in any process, keeps
// the lock that was set at its creation. Who created it asks, through a descriptor of another opening, if it is free.
static void count_what_came_back(void) {
  for (int i = 1; i < MAX_CHUNKS; i++) {
    if (!chunks[i].gone || flock(chunks[i].fd, LOCK_EX | LOCK_NB)) continue;
    close(chunks[i].fd);
    chunk_bytes_live[chunks[i].device] -= chunks[i].size;
    chunks[i] = (Chunk){0};
  }
}
static void drop_if_unused(int i) {
  Chunk *c = &chunks[i];
  if (c->live || c->mappings) return;
  generations[i]++;
  if (c->imported) { close(c->fd); *c = (Chunk){0}; return; }
  char path[32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", c->fd);
  int other = open(path, O_RDWR | O_CLOEXEC);
  close(c->fd);
  if (other < 0) { chunk_bytes_live[c->device] -= c->size; *c = (Chunk){0}; return; }
  c->fd = other;
  c->gone = 1;
}
static int free_slot_of_chunks(void) {
  for (int i = 1; i < MAX_CHUNKS; i++) if (!chunks[i].fd) return i;
  return 0;
}
static unsigned long long handle_of(int slot) { return (unsigned long long)generations[slot] * MAX_CHUNKS + slot; }
static Chunk *known(unsigned long long handle) {
  int slot = handle % MAX_CHUNKS;
  return slot && chunks[slot].live && handle_of(slot) == handle ? &chunks[slot] : NULL;
}
static int good(const AllocationProp *p) {
  return p->type == PINNED && !p->win32 && p->location.type == ON_DEVICE && p->location.id >= 0 &&
         p->location.id < devices;
}

// ------------------------------------------------------------------ device and context
static Result init(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (initialized) return OK;
  capacity = setting("PREFIXD_STAND_IN_MEMORY_BYTES", 1l << 30);
  devices = setting("PREFIXD_STAND_IN_DEVICES", 1);
  copy_us = setting("PREFIXD_STAND_IN_COPY_US", 300);
  if (devices < 1 || devices > MAX_DEVICES) return INVALID_VALUE;
  for (int i = 0; i < devices; i++) streams[i].context = &contexts[i];
  initialized = 1;
  return OK;
}
static Result driver_get_version(int *version) { *version = 13000; return OK; }
static Result device_get(int *device, int ordinal) {
  if (!initialized) return NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}
static Result device_get_count(int *n) { if (!initialized) return NOT_INITIALIZED; *n = devices; return OK; }
static Result device_get_name(char *name, int n, int device) { snprintf(name, n, "prefixd stand-in"); return OK; }
static Result device_get_attribute(int *value, int attribute, int device) {
  *value = attribute == ATTRIBUTE_VIRTUAL_MEMORY || attribute == ATTRIBUTE_POSIX_FD;
  return OK;
}
static Result primary_ctx_retain(void **context, int device) {
  if (!initialized) return NOT_INITIALIZED;
  if (device < 0 || device >= devices) return INVALID_DEVICE;
  *context = &contexts[device];
  return OK;
}
static int is_context(void *context) {
  for (int i = 0; i < devices; i++) if (context == &contexts[i]) return 1;
  return 0;
}
static Result ctx_push_current(void *context) {
  if (!initialized) return NOT_INITIALIZED;
  if (!is_context(context) || depth == MAX_PUSHED) return INVALID_CONTEXT;
  pushed[depth++] = context;
  return OK;
}
static Result ctx_pop_current(void **context) {
  if (!initialized) return NOT_INITIALIZED;
  if (!depth) return INVALID_CONTEXT;
  *context = pushed[--depth];
  return OK;
}
static Result ctx_set_current(void *context) {
  if (!initialized) return NOT_INITIALIZED;
  if (context && !is_context(context)) return INVALID_CONTEXT;
  if (depth) depth--;
  return context ? ctx_push_current(context) : OK;
}
static Result get_error_name(Result e, const char **name) {
  static const struct { Result code; const char *name; } names[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].code == e) { *name = names[i].name; return OK; }
  return INVALID_VALUE;
}
static Result mem_get_info(size_t *free_bytes, size_t *total) {
  NEEDS_CONTEXT;
  pthread_mutex_lock(&lock);
  count_what_came_back();
  *total = capacity;
  *free_bytes = capacity - chunk_bytes_live[current_context()->device];
  pthread_mutex_unlock(&lock);
  return OK;
}

// ------------------------------------------------------------------ virtual memory
static Result get_granularity(size_t *g, const AllocationProp *p, int option) {
  if (!good(p)) return INVALID_VALUE;
  *g = GRANULARITY;
  return OK;
}
static Result reserve_locked(uintptr_t *out, size_t n, size_t align) {
  int slot = 0;
  while (slot < MAX_RANGES && ranges[slot].used) slot++;
  if (slot == MAX_RANGES) return OUT_OF_MEMORY;
  char *raw = mmap(NULL, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return OUT_OF_MEMORY;
  uintptr_t low = (uintptr_t)raw, base = (low + align - 1) / align * align, high = low + n + align;
  if (base > low) munmap(raw, base - low);
  if (high > base + n) munmap((void *)(base + n), high - base - n);
  ranges[slot] = (Range){base, n, 1};
  *out = base;
  return OK;
}
static Result address_reserve(uintptr_t *out, size_t n, size_t align, uintptr_t hint, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (flags || !n || n % GRANULARITY || (align & (align - 1))) return INVALID_VALUE;
  LOCKED(reserve_locked(out, n, align < GRANULARITY ? GRANULARITY : align));
}
static Result address_free_locked(uintptr_t base, size_t n) {
  for (int i = 0; i < MAX_CHUNKS; i++)
    if (mappings[i].used && overlaps(base, n, mappings[i].base, mappings[i].size)) return INVALID_VALUE;
  for (int i = 0; i < MAX_RANGES; i++)
    if (ranges[i].used && ranges[i].base == base && ranges[i].size == n) {
      munmap((void *)base, n);
      ranges[i].used = 0;
      return OK;
    }
  return INVALID_VALUE;
}
static Result address_free(uintptr_t base, size_t n) { NEEDS_CONTEXT; LOCKED(address_free_locked(base, n)); }

static Result create_locked(unsigned long long *handle, size_t n, int exportable, int device) {
  count_what_came_back();
  int slot = free_slot_of_chunks();
  if (!slot || n > capacity - chunk_bytes_live[device]) return OUT_OF_MEMORY;
  int fd = memfd_create("stand-in-chunk", MFD_CLOEXEC);
  if (fd < 0) return OUT_OF_MEMORY;
  if (ftruncate(fd, n) || flock(fd, LOCK_SH)) { close(fd); return OUT_OF_MEMORY; }
  chunks[slot] = (Chunk){.fd = fd, .live = 1, .exportable = exportable, .device = device, .size = n};
  chunk_bytes_live[device] += n;
  *handle = handle_of(slot);
  return OK;
}
static Result create(unsigned long long *handle, size_t n, const AllocationProp *p, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (flags || !good(p) || !n || n % GRANULARITY) return INVALID_VALUE;
  LOCKED(create_locked(handle, n, p->handle_types == POSIX_FD, p->location.id));
}
static Result release_locked(unsigned long long handle) {
  Chunk *chunk = known(handle);
  if (!chunk) return INVALID_VALUE;
  chunk->live = 0;
  drop_if_unused(chunk - chunks);
  return OK;
}
static Result release(unsigned long long handle) { NEEDS_CONTEXT; LOCKED(release_locked(handle)); }

static Result map_locked(uintptr_t base, size_t n, unsigned long long handle) {
  Chunk *chunk = known(handle);
  if (!chunk || n > chunk->size || !reserved(base, n)) return INVALID_VALUE;
  int slot = -1;
  for (int i = 0; i < MAX_CHUNKS; i++) {
    if (!mappings[i].used) { if (slot < 0) slot = i; continue; }
    if (overlaps(base, n, mappings[i].base, mappings[i].size)) return ALREADY_MAPPED;
  }
  if (slot < 0) return OUT_OF_MEMORY;
  if (mmap((void *)base, n, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  mappings[slot] = (Mapping){base, n, chunk - chunks, 0, 1};
  chunk->mappings++;
  return OK;
}
static Result map(uintptr_t base, size_t n, size_t offset, unsigned long long handle, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (flags || offset || !n || n % GRANULARITY || base % GRANULARITY) return INVALID_VALUE;
  LOCKED(map_locked(base, n, handle));
}
static Result set_access_locked(uintptr_t base, size_t n, int device) {
  if (!n || covered(base, n, 0) != n) return INVALID_VALUE;
  for (int i = 0; i < MAX_CHUNKS; i++) {
    Mapping *m = &mappings[i];
    if (!m->used || !inside(m->base, m->size, base, n)) continue;
    int on = chunks[m->chunk].device;
    if (on != ANY_DEVICE && on != device) return INVALID_VALUE;  // these devices are no peers
    m->accessible = 1;
  }
  return mprotect((void *)base, n, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
static Result set_access(uintptr_t base, size_t n, const AccessDesc *access, size_t count) {
  NEEDS_CONTEXT;
  if (count != 1 || access->location.type != ON_DEVICE || access->flags != READ_WRITE) return INVALID_VALUE;
  LOCKED(set_access_locked(base, n, access->location.id));
}
static Result unmap_locked(uintptr_t base, size_t n) {
  if (!n || covered(base, n, 0) != n) return INVALID_VALUE;
  for (int i = 0; i < MAX_CHUNKS; i++) {
    Mapping *m = &mappings[i];
    if (!m->used || !inside(m->base, m->size, base, n)) continue;
    m->used = 0;
    chunks[m->chunk].mappings--;
    drop_if_unused(m->chunk);
  }
  void *at = mmap((void *)base, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? OUT_OF_MEMORY : OK;
}
static Result unmap(uintptr_t base, size_t n) { NEEDS_CONTEXT; LOCKED(unmap_locked(base, n)); }

static Result export_locked(int *fd, unsigned long long handle) {
  Chunk *chunk = known(handle);
  if (!chunk || !chunk->exportable) return INVALID_VALUE;
  *fd = dup(chunk->fd);
  return *fd < 0 ? OUT_OF_MEMORY : OK;
}
static Result export_handle(void *fd, unsigned long long handle, int type, unsigned long long flags) {
  NEEDS_CONTEXT;
  if (flags || type != POSIX_FD) return INVALID_VALUE;
  LOCKED(export_locked(fd, handle));
}
static Result import_locked(unsigned long long *handle, int fd) {
  struct stat s;
  int slot = free_slot_of_chunks();
  if (fstat(fd, &s) || !s.st_size || s.st_size % GRANULARITY) return INVALID_VALUE;
  int own = slot ? dup(fd) : -1;
  if (own < 0) return OUT_OF_MEMORY;
  chunks[slot] = (Chunk){.fd = own, .live = 1, .imported = 1, .device = ANY_DEVICE, .size = s.st_size};
  *handle = handle_of(slot);
  return OK;
}
static Result import_handle(unsigned long long *handle, void *fd, int type) {
  NEEDS_CONTEXT;
  if (type != POSIX_FD) return INVALID_VALUE;
  LOCKED(import_locked(handle, (int)(intptr_t)fd));
}

// ------------------------------------------------------------------ pinned host memory
static Result host_register_locked(uintptr_t base, size_t n) {
  int slot = -1;
  for (int i = 0; i < MAX_PINNED; i++) {
    if (pinned[i].used && overlaps(base, n, pinned[i].base, pinned[i].size)) return HOST_MEMORY_ALREADY_REGISTERED;
    if (!pinned[i].used && slot < 0) slot = i;
  }
  if (slot < 0) return OUT_OF_MEMORY;
  pinned[slot] = (Range){base, n, 1};
  return OK;
}
static Result host_register(void *base, size_t n, unsigned flags) {
  NEEDS_CONTEXT;
  if (!base || !n) return INVALID_VALUE;
  LOCKED(host_register_locked((uintptr_t)base, n));
}
static Result host_unregister_locked(uintptr_t base) {
  for (int i = 0; i < MAX_PINNED; i++)
    if (pinned[i].used && pinned[i].base == base) { pinned[i].used = 0; return OK; }
  return HOST_MEMORY_NOT_REGISTERED;
}
// Whether host memory is registered by one call, or not at all: all that a copy can read or write.
static int pinned_whole(uintptr_t base, size_t n) {
  for (int i = 0; i < MAX_PINNED; i++)
    if (pinned[i].used && overlaps(base, n, pinned[i].base, pinned[i].size))
      return inside(base, n, pinned[i].base, pinned[i].size);
  return 1;
}
static Result host_unregister(void *base) { NEEDS_CONTEXT; LOCKED(host_unregister_locked((uintptr_t)base)); }

#include "kernels.h"

// ------------------------------------------------------------------ streams, events, copies
static void execute(Op *op) {
  if (op->kind == WAIT) {
    while (op->other->done < op->at) pthread_cond_wait(&moved, &lock);
    return;
  }
  if (op->kind == LAUNCH) {
    if (!mapped(&op->launch)) failed = ILLEGAL_ADDRESS;
    if (!failed) compute(&op->launch);
    return;
  }
  for (size_t row = 0; row < op->rows; row++) {
    char *dst = (char *)op->dst + row * op->dst_pitch, *src = (char *)op->src + row * op->src_pitch;
    int reads = op->kind == COPY_TO_DEVICE || covered((uintptr_t)src, op->n, 1) == op->n;
    int writes = op->kind == COPY_TO_HOST || covered((uintptr_t)dst, op->n, 1) == op->n;
    if (!reads || !writes) failed = ILLEGAL_ADDRESS;
    if (!failed) memcpy(dst, src, op->n);
  }
}
static void *run(void *argument) {
  Stream *s = argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!s->head && s->live) pthread_cond_wait(&moved, &lock);
    Op *op = s->head;
    if (!op) break;
    if (op->kind != WAIT) {
      pthread_mutex_unlock(&lock);
      usleep(copy_us);
      pthread_mutex_lock(&lock);
    }
    execute(op);
    s->head = op->next;
    if (!s->head) s->tail = NULL;
    s->done++;
    free(op);
    pthread_cond_broadcast(&moved);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}
static Stream *stream_of(void *handle) {
  Stream *s = handle ? handle : &streams[current_context()->device];
  if (s < streams || s >= streams + MAX_STREAMS) return NULL;
  if (s < streams + devices && !s->live) { s->live = 1; pthread_create(&s->thread, NULL, run, s); }
  return s->live ? s : NULL;
}
static Result submit(void *handle, Op wanted) {
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(handle);
  if (s) {
    Op *op = malloc(sizeof *op);
    *op = wanted;
    if (s->tail) s->tail->next = op; else s->head = op;
    s->tail = op;
    s->submitted++;
    pthread_cond_broadcast(&moved);
  }
  pthread_mutex_unlock(&lock);
  return s ? OK : INVALID_HANDLE;
}
static Result stream_create(void **out, unsigned flags) {
  NEEDS_CONTEXT;
  pthread_mutex_lock(&lock);
  int i = MAX_DEVICES;
  while (i < MAX_STREAMS && (streams[i].live || streams[i].submitted)) i++;
  if (i < MAX_STREAMS) {
    streams[i].live = 1;
    streams[i].context = current_context();
    pthread_create(&streams[i].thread, NULL, run, &streams[i]);
    *out = &streams[i];
  }
  pthread_mutex_unlock(&lock);
  return i < MAX_STREAMS ? OK : OUT_OF_MEMORY;
}
static Result wait_for(Stream *s, uint64_t at) {
  while (s->done < at) pthread_cond_wait(&moved, &lock);
  return failed;
}
static Result stream_destroy(void *handle) {
  NEEDS_CONTEXT;
  Stream *s = handle;
  pthread_mutex_lock(&lock);
  int mine = s >= streams + MAX_DEVICES && s < streams + MAX_STREAMS && s->live;
  if (mine) { s->live = 0; pthread_cond_broadcast(&moved); }
  pthread_mutex_unlock(&lock);
  if (!mine) return INVALID_HANDLE;
  pthread_join(s->thread, NULL);  // the slot is kept if it was used: events may still point at it
  return OK;
}
static Result stream_synchronize(void *handle) {
  NEEDS_CONTEXT;
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(handle);
  Result r = s ? wait_for(s, s->submitted) : INVALID_HANDLE;
  pthread_mutex_unlock(&lock);
  return r;
}
static Result event_create(Event **out, unsigned flags) {
  NEEDS_CONTEXT;
  *out = calloc(1, sizeof(Event));
  if (!*out) return OUT_OF_MEMORY;
  **out = (Event){.context = current_context(), .live = 1};
  return OK;
}
#define NEEDS_EVENT do { NEEDS_CONTEXT; if (!event || !event->live) return INVALID_HANDLE; } while (0)
static Result event_destroy(Event *event) { NEEDS_EVENT; event->live = 0; return OK; }
static Result event_record(Event *event, void *handle) {
  NEEDS_EVENT;
  pthread_mutex_lock(&lock);
  Stream *s = stream_of(handle);
  int fits = s && s->context == event->context;
  if (fits) { event->stream = s; event->at = s->submitted; }
  pthread_mutex_unlock(&lock);
  return fits ? OK : INVALID_HANDLE;
}
static Result event_query(Event *event) {
  NEEDS_EVENT;
  LOCKED(!event->stream || event->stream->done >= event->at ? OK : NOT_READY);
}
static Result event_synchronize(Event *event) {
  NEEDS_EVENT;
  LOCKED(event->stream ? wait_for(event->stream, event->at) : OK);
}
static Result stream_wait_event(void *handle, Event *event, unsigned flags) {
  NEEDS_EVENT;
  if (!event->stream || copy_us < 0) return OK;
  return submit(handle, (Op){.kind = WAIT, .other = event->stream, .at = event->at});
}
static Result copy_rows(void *stream, int kind, uintptr_t dst, uintptr_t src, size_t n, size_t rows, size_t dst_pitch,
                        size_t src_pitch) {
  if (copy_us < 0) return OK;
  size_t dst_span = (rows - 1) * dst_pitch + n, src_span = (rows - 1) * src_pitch + n;
  pthread_mutex_lock(&lock);
  int dst_on_device = reserved(dst, dst_span), src_on_device = reserved(src, src_span);
  int whole = (dst_on_device || pinned_whole(dst, dst_span)) && (src_on_device || pinned_whole(src, src_span));
  pthread_mutex_unlock(&lock);
  if (!whole || dst_on_device != (kind != COPY_TO_HOST) || src_on_device != (kind != COPY_TO_DEVICE))
    return INVALID_VALUE;
  return submit(stream, (Op){.kind = kind, .dst = (void *)dst, .src = (void *)src, .n = n, .rows = rows,
                             .dst_pitch = dst_pitch, .src_pitch = src_pitch});
}
static Result copy(void *stream, int kind, uintptr_t dst, uintptr_t src, size_t n) {
  NEEDS_CONTEXT;
  return copy_rows(stream, kind, dst, src, n, 1, n, n);
}
static Result copy_2d(const Copy2D *c, void *stream) {
  NEEDS_CONTEXT;
  if (c->src.x || c->src.y || c->dst.x || c->dst.y || !c->height || c->width > c->src.pitch || c->width > c->dst.pitch ||
      c->src.pitch > INT32_MAX || c->dst.pitch > INT32_MAX)
    return INVALID_VALUE;
  if (c->src.type == HOST_MEMORY && c->dst.type == DEVICE_MEMORY)
    return copy_rows(stream, COPY_TO_DEVICE, c->dst.device, (uintptr_t)c->src.host, c->width, c->height, c->dst.pitch,
                     c->src.pitch);
  if (c->src.type == DEVICE_MEMORY && c->dst.type == HOST_MEMORY)
    return copy_rows(stream, COPY_TO_HOST, (uintptr_t)c->dst.host, c->src.device, c->width, c->height, c->dst.pitch,
                     c->src.pitch);
  return INVALID_VALUE;
}
// Of each copy, the direction comes from the addresses, as with unified addressing.
static Result copy_batch(uintptr_t *dsts, uintptr_t *srcs, size_t *sizes, size_t count, void *attributes, size_t *firsts,
                         size_t attribute_count, void *stream) {
  NEEDS_CONTEXT;
  if (!stream || !attributes || attribute_count != 1 || *firsts) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    pthread_mutex_lock(&lock);
    int to = reserved(dsts[i], sizes[i]), from = reserved(srcs[i], sizes[i]);
    pthread_mutex_unlock(&lock);
    if (!to && !from) return INVALID_VALUE;
    Result r = copy(stream, to && from ? COPY_ON_DEVICE : to ? COPY_TO_DEVICE : COPY_TO_HOST, dsts[i], srcs[i], sizes[i]);
    if (r) return r;
  }
  return OK;
}
static Result launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     unsigned shared, void *stream, void **p, void **extra) {
  NEEDS_CONTEXT;
  if (copy_us < 0) return OK;
  if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra) return INVALID_VALUE;
  Launch l = {function, *(void **)p[0], *(void **)p[1], *(void **)p[2], *(unsigned long long *)p[3],
              *(unsigned *)p[4], *(unsigned *)p[5], *(unsigned *)p[6], gx, bx};
  if (!l.run_count || !l.places || !l.blocks) return INVALID_VALUE;
  return submit(stream, (Op){.kind = LAUNCH, .launch = l});
}
static Result memcpy_to_device(uintptr_t dst, const void *src, size_t n, void *stream) {
  return copy(stream, COPY_TO_DEVICE, dst, (uintptr_t)src, n);
}
static Result memcpy_to_host(void *dst, uintptr_t src, size_t n, void *stream) {
  return copy(stream, COPY_TO_HOST, (uintptr_t)dst, src, n);
}
static Result memcpy_on_device(uintptr_t dst, uintptr_t src, size_t n, void *stream) {
  return copy(stream, COPY_ON_DEVICE, dst, src, n);
}

// ------------------------------------------------------------------ how bindings find the functions
Result cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status) {
  static const struct { const char *name; void *function; } table[] = {
    {"cuGetProcAddress", cuGetProcAddress_v2}, {"cuInit", init}, {"cuDriverGetVersion", driver_get_version},
    {"cuDeviceGet", device_get}, {"cuDeviceGetCount", device_get_count}, {"cuDeviceGetName", device_get_name},
    {"cuDeviceGetAttribute", device_get_attribute}, {"cuDevicePrimaryCtxRetain", primary_ctx_retain},
    {"cuCtxSetCurrent", ctx_set_current}, {"cuCtxPushCurrent", ctx_push_current},
    {"cuCtxPopCurrent", ctx_pop_current}, {"cuGetErrorName", get_error_name}, {"cuMemGetInfo", mem_get_info},
    {"cuMemGetAllocationGranularity", get_granularity}, {"cuMemAddressReserve", address_reserve},
    {"cuMemAddressFree", address_free}, {"cuMemCreate", create}, {"cuMemRelease", release}, {"cuMemMap", map},
    {"cuMemSetAccess", set_access}, {"cuMemUnmap", unmap}, {"cuMemExportToShareableHandle", export_handle},
    {"cuMemImportFromShareableHandle", import_handle}, {"cuMemHostRegister", host_register},
    {"cuMemHostUnregister", host_unregister}, {"cuStreamCreate", stream_create}, {"cuStreamDestroy", stream_destroy},
    {"cuStreamSynchronize", stream_synchronize}, {"cuStreamWaitEvent", stream_wait_event},
    {"cuEventCreate", event_create}, {"cuEventDestroy", event_destroy}, {"cuEventRecord", event_record},
    {"cuEventQuery", event_query}, {"cuEventSynchronize", event_synchronize},
    {"cuMemcpyHtoDAsync", memcpy_to_device}, {"cuMemcpyDtoHAsync", memcpy_to_host},
    {"cuMemcpyDtoDAsync", memcpy_on_device}, {"cuMemcpy2DAsync", copy_2d}, {"cuMemcpyBatchAsync", copy_batch},
    {"cuModuleLoadData", module_load}, {"cuModuleGetFunction", module_function}, {"cuLaunchKernel", launch}};
  *out = NULL;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, symbol)) *out = table[i].function;
  if (status) *status = *out ? 0 : 1;
  return *out ? OK : NOT_FOUND;
}
