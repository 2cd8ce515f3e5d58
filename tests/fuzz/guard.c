/* Preloaded: memory that kernels ask for by the page ends at a page that cannot be touched. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { kPage = 4096, kGuard = 1 << 20 };

int posix_memalign(void** out, size_t alignment, size_t size) {
  const size_t bytes = (size + kPage - 1) / kPage * kPage;
  if (alignment != kPage) {
    *out = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    return *out == NULL ? ENOMEM : 0;
  }
  char* memory = mmap(NULL, bytes + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) return ENOMEM;
  *out = memory; /* never freed: kernels keep their working memory */
  return 0;
}
