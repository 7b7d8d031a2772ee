// AVX2 by run-time dispatch: functions that need AVX2 are marked SHOAL_AVX2 and called if has_avx2() returns true. Each has a
// portable equivalent that gives the same bits.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#define SHOAL_AVX2 __attribute__((target("avx2,bmi")))
#endif

namespace shoal {

inline bool has_avx2() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi") != 0;
#else
  return false;
#endif
}

}  // namespace shoal
