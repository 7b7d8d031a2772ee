// Widening of stored rows to floats: a number at a time, or eight by intrinsics, with the same bits; and the
// first number of a row that is marked as removed (export/row_format.h).
//
// Threads: pure functions.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "base/intrinsics.h"
#include "base/simd.h"
#include "base/unaligned.h"

namespace shoal::widen {

inline constexpr std::size_t kScaleBytes = 2;

#if defined(__x86_64__)
using Eight = __m256;

SHOAL_SIMD inline void store(float* to, Eight numbers) noexcept { _mm256_storeu_ps(to, numbers); }
#elif defined(SHOAL_SIMD)
using Eight = float32x4x2_t;

inline void store(float* to, Eight numbers) noexcept {
  vst1q_f32(to, numbers.val[0]);
  vst1q_f32(to + 4, numbers.val[1]);
}

// Rows are aligned to bytes.
inline uint8x16_t load_16(const std::byte* from) noexcept {
  return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
}

// The halves of eight numbers of 16 bits, each with 32.
inline uint32x4_t low_half(uint16x8_t x) noexcept { return vmovl_u16(vget_low_u16(x)); }
inline uint32x4_t high_half(uint16x8_t x) noexcept { return vmovl_u16(vget_high_u16(x)); }
#endif

struct Float32 {
  using Stored = float;
  static constexpr std::size_t kFirst = 0;  // bytes before the first
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint32_t>(row) & 0x7fffffffU) > 0x7f800000U;
  }
  SHOAL_INLINE explicit Float32(const std::byte*) noexcept {}
  SHOAL_INLINE float scalar(float x) const noexcept { return x; }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    return {{vreinterpretq_f32_u8(load_16(from)), vreinterpretq_f32_u8(load_16(from + 16))}};
  }
#endif
};

struct Float16 {
  using Stored = std::uint16_t;
  static constexpr std::size_t kFirst = 0;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint16_t>(row) & 0x7fffU) > 0x7c00U;
  }
  SHOAL_INLINE explicit Float16(const std::byte*) noexcept {}
  SHOAL_INLINE float scalar(std::uint16_t x) const noexcept { return from_float16(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {  // the same as base/half.h
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i size = _mm256_and_si256(x, _mm256_set1_epi32(0x7fff));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x8000)), 16);
    const __m256i beyond =
        _mm256_and_si256(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7bff)), _mm256_set1_epi32(0x7f800000));
    const __m256 mended =
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(size, 13)), _mm256_set1_ps(0x1p112F));
    return _mm256_or_ps(mended, _mm256_castsi256_ps(_mm256_or_si256(sign, beyond)));
  }
#elif defined(SHOAL_SIMD)
  // The same as base/half.h. The instruction for it changes some NaNs.
  static float32x4_t four(uint32x4_t x) noexcept {
    const uint32x4_t size = vandq_u32(x, vdupq_n_u32(0x7fff));
    const uint32x4_t sign = vshlq_n_u32(vandq_u32(x, vdupq_n_u32(0x8000)), 16);
    const uint32x4_t beyond = vandq_u32(vcgtq_u32(size, vdupq_n_u32(0x7bff)), vdupq_n_u32(0x7f800000));
    const float32x4_t mended = vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32(size, 13)), vdupq_n_f32(0x1p112F));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(mended), vorrq_u32(sign, beyond)));
  }
  Eight eight(const std::byte* from) const noexcept {
    const uint16x8_t x = vreinterpretq_u16_u8(load_16(from));
    return {{four(low_half(x)), four(high_half(x))}};
  }
#endif
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  static constexpr std::size_t kFirst = 0;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint16_t>(row) & 0x7fffU) > 0x7f80U;
  }
  SHOAL_INLINE explicit Bfloat16(const std::byte*) noexcept {}
  SHOAL_INLINE float scalar(std::uint16_t x) const noexcept { return from_bfloat16(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    const uint16x8_t x = vreinterpretq_u16_u8(load_16(from));
    return {{vreinterpretq_f32_u32(vshlq_n_u32(low_half(x), 16)),
             vreinterpretq_f32_u32(vshlq_n_u32(high_half(x), 16))}};
  }
#endif
};

struct Int8 {
  using Stored = std::int8_t;
  static constexpr std::size_t kFirst = kScaleBytes;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return row[kFirst] == std::byte{0x80};
  }
  SHOAL_INLINE explicit Int8(const std::byte* row) noexcept
      : scale(from_bfloat16(load<std::uint16_t>(row))) {}
  SHOAL_INLINE float scalar(std::int8_t x) const noexcept { return scale * static_cast<float>(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(x));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    const int16x8_t x = vmovl_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(from)));
    const float32x4_t factor = vdupq_n_f32(scale);
    return {{vmulq_f32(factor, vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)))),
             vmulq_f32(factor, vcvtq_f32_s32(vmovl_s16(vget_high_s16(x))))}};
  }
#endif
  float scale;
};

#if defined(SHOAL_SIMD)
template <class Kind>
__attribute__((always_inline)) SHOAL_SIMD inline void row_by_simd(const std::byte* row, std::size_t dim,
                                                                  float* to) noexcept {
  using Stored = typename Kind::Stored;
  const Kind kind(row);
  const std::byte* const from = row + Kind::kFirst;
  std::size_t e = 0;
  for (; e + 8 <= dim; e += 8) {
    store(to + e, kind.eight(from + e * sizeof(Stored)));
  }
  for (; e < dim; ++e) {
    to[e] = kind.scalar(load<Stored>(from + e * sizeof(Stored)));
  }
}
#endif

}  // namespace shoal::widen
