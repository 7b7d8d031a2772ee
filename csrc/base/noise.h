// Counter-based random bits: a pure function of their purpose; and stochastic rounding with them.
//
// Nothing here has state: a row's word is hashed from (seed, step, hash of the key), and an element's bits
// from that word, the element, the column and the bits being replaced. So results do not depend on threads,
// slots, servers or order, and a run can be repeated. The step is essential: without it an accumulator that
// stalls once would get the same bits again and stall for ever.

#pragma once

#include <bit>
#include <cstdint>

#include "base/mix.h"
#include "base/simd.h"

namespace shoal {

// Murmur3's 32-bit finalizer (Appleby, public domain): a bijection in which every input bit affects the
// result.
SHOAL_INLINE constexpr std::uint32_t scramble(std::uint32_t x) noexcept {
  x = (x ^ (x >> 16U)) * 0x85ebca6bU;
  x = (x ^ (x >> 13U)) * 0xc2b2ae35U;
  return x ^ (x >> 16U);
}

// The part that all rows of a push share.
SHOAL_INLINE constexpr std::uint64_t step_noise(std::uint64_t seed, std::uint64_t step) noexcept {
  return mix(seed ^ mix(step));
}

SHOAL_INLINE constexpr std::uint32_t row_noise(std::uint64_t step_noise, std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(((hash ^ step_noise) * 0xd6e8feb86659fd93U) >> 32U);
}

SHOAL_INLINE constexpr std::uint32_t element_noise(std::uint32_t row_noise, std::uint32_t element) noexcept {
  return row_noise + element * 0x9e3779b9U;
}

// The bits for one number: `column` distinguishes the numbers of one element.
SHOAL_INLINE constexpr std::uint32_t bits_for(std::uint32_t noise, std::uint32_t column,
                                              std::uint32_t old) noexcept {
  return scramble((noise + column * 0x7f4a7c15U) ^ old);
}

// Stochastic rounding to float32: the upper neighbour with probability (x - below) / (above - below), so the
// mean is x; a float32 is unchanged. A number too large for float32 becomes an infinity. (Below 2^-126 the
// tie bits are rounded to nearest once more.)
SHOAL_INLINE float round_stochastically(double x, std::uint32_t bits) noexcept {
  constexpr std::uint64_t kDropped = (std::uint64_t{1} << 29U) - 1;  // 52 - 23 mantissa bits
  return static_cast<float>(
      std::bit_cast<double>((std::bit_cast<std::uint64_t>(x) + (bits & kDropped)) & ~kDropped));
}

// For accumulators, sums of many small terms, which must not stall: x + change, rounded stochastically.
SHOAL_INLINE float accumulate(float x, double change, std::uint32_t noise, std::uint32_t column) noexcept {
  return round_stochastically(static_cast<double>(x) + change,
                              bits_for(noise, column, std::bit_cast<std::uint32_t>(x)));
}

}  // namespace shoal
