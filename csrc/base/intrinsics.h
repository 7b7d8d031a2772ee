// Vector intrinsics of this architecture: functions that use them are marked SHOAL_SIMD and called if
// has_simd() returns true. Each has a portable equivalent that gives the same bits.
//
//   x86-64   AVX2 and BMI, which older processors lack: chosen at run time
//   ARM      Neon, which every 64-bit processor has
//
// Elsewhere SHOAL_SIMD is not defined, and the portable code runs.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#define SHOAL_SIMD __attribute__((target("avx2,bmi")))
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

#define SHOAL_SIMD
#endif

namespace shoal {

inline bool has_simd() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi") != 0;
#elif defined(SHOAL_SIMD)
  return true;
#else
  return false;
#endif
}

}  // namespace shoal
