/* Preloaded: page-aligned memory that kernels allocate ends at pages without access. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { kPage = 4096, kGuard = 1 << 20, kMost = 1024 };

static void* guarded[kMost];
static int count;

void __libc_free(void*);

int posix_memalign(void** out, size_t alignment, size_t size) {
  const size_t bytes = (size + kPage - 1) / kPage * kPage;
  const int slot = alignment == kPage ? __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED) : kMost;
  if (slot >= kMost) {
    *out = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    return *out == NULL ? ENOMEM : 0;
  }
  char* memory = mmap(NULL, bytes + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) return ENOMEM;
  guarded[slot] = memory;
  *out = memory;
  return 0;
}

void free(void* memory) { /* guarded memory is never freed */
  for (int i = 0; i < count && i < kMost; ++i)
    if (memory != NULL && guarded[i] == memory) return;
  __libc_free(memory);
}
