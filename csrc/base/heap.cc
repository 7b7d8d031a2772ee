#include "base/heap.h"

#ifdef __linux__
#include <malloc.h>
#endif

namespace shoal {

void keep_freed_memory() noexcept {
#ifdef __GLIBC__
  constexpr int kMost =
      32 << 20;  // the greatest that glibc takes: from here on blocks stay mappings of their own
  mallopt(M_MMAP_THRESHOLD, kMost);
  mallopt(M_TRIM_THRESHOLD, 4 * kMost);
#endif
}

}  // namespace shoal
