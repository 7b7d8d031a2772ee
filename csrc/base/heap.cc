#include "base/heap.h"

#ifdef __linux__
#include <malloc.h>
#endif

namespace shoal {

void keep_freed_memory() noexcept {
#ifdef __GLIBC__
  constexpr int kMax = 32 << 20;  // the maximum of glibc; larger blocks are still mapped separately
  mallopt(M_MMAP_THRESHOLD, kMax);
  mallopt(M_TRIM_THRESHOLD, 4 * kMax);
#endif
}

}  // namespace shoal
