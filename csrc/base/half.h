// 16-bit storage of weights: bfloat16 and float16 (IEEE binary16), with stochastic rounding.
//
// Widening is exact. Narrowing adds uniform random bits below the last kept bit and truncates: the upper
// neighbour results with probability (x - below) / (above - below), so the mean is x, and a number that is
// representable is unchanged. Infinities and NaNs are kept; a number that is too large becomes the largest
// finite one (65504 for float16).

#pragma once

#include <bit>
#include <cstdint>

#include "base/simd.h"

namespace shoal {

enum class Dtype : std::uint8_t { kFloat32, kFloat16, kBfloat16 };

constexpr std::uint32_t bytes_of(Dtype dtype) noexcept { return dtype == Dtype::kFloat32 ? 4 : 2; }

SHOAL_INLINE float from_bfloat16(std::uint16_t x) noexcept {
  return std::bit_cast<float>(std::uint32_t{x} << 16U);
}

SHOAL_INLINE std::uint16_t to_bfloat16(float x, std::uint32_t noise) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits & 0x80000000U;
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16U) |
                                      0x0040U);  // a NaN with its payload in the low bits stays a NaN
  }
  const std::uint32_t rounded = size + (noise & 0xffffU);
  const std::uint32_t kept = size == 0x7f800000U ? size : (rounded >= 0x7f800000U ? 0x7f7f0000U : rounded);
  return static_cast<std::uint16_t>((sign | kept) >> 16U);
}

SHOAL_INLINE float from_float16(std::uint16_t x) noexcept {
  const std::uint32_t sign = (std::uint32_t{x} & 0x8000U) << 16U;
  const std::uint32_t size = x & 0x7fffU;
  if (size >= 0x7c00U) {  // infinity, NaN
    return std::bit_cast<float>(sign | 0x7f800000U | ((size & 0x3ffU) << 13U));
  }
  // As a float whose exponent is 112 too small, including subnormals; one exact product corrects it.
  return std::bit_cast<float>(sign |
                              std::bit_cast<std::uint32_t>(std::bit_cast<float>(size << 13U) * 0x1p112F));
}

SHOAL_INLINE std::uint16_t to_float16(float x, std::uint32_t noise) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size >= 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | (size > 0x7f800000U ? 0x7e00U : 0x7c00U));
  }
  if (size >= 0x477fe000U) {  // 65504 and above
    return static_cast<std::uint16_t>(sign | 0x7bffU);
  }
  // Below 2^-14 the grid is 2^-24: x / 2^-24 < 1024, so its 24 bits below the point suffice.
  if (size < 0x38800000U) {
    const float steps = std::bit_cast<float>(size) * 0x1p24F;
    const auto below = static_cast<std::uint32_t>(steps);
    const auto rest = static_cast<std::uint32_t>((steps - static_cast<float>(below)) * 0x1p24F);
    return static_cast<std::uint16_t>(sign | (below + ((noise >> 8U) < rest ? 1U : 0U)));
  }
  const std::uint32_t rounded = size + (noise & 0x1fffU);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13U));
}

}  // namespace shoal
