// 64-bit integers in arrays of floats: integer i is the bits of floats 2 i and 2 i + 1, lower half first.
//
// Rows, batches and messages consist of 4-byte words that most of the engine only copies, so they can hold
// 8-byte integers without a second kind of array. Copying a float keeps its bits; whatever calculates,
// compares or checks must know which one it has.
//
// Sums are modulo 2^64, in two's complement.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/simd.h"

namespace shoal {

enum class Elements : std::uint8_t { kFloat32, kInt64Pairs };

inline constexpr std::size_t kInt64Floats = sizeof(std::int64_t) / sizeof(float);

SHOAL_INLINE std::uint64_t load_int64(const float* at) noexcept {
  std::uint64_t number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

SHOAL_INLINE void store_int64(std::uint64_t number, float* at) noexcept {
  std::memcpy(at, &number, sizeof number);
}

// Adds the numbers in `floats` floats, an even number.
SHOAL_INLINE void add_int64(const float* from, float* to, std::size_t floats) noexcept {
  for (std::size_t i = 0; i < floats; i += kInt64Floats) {
    store_int64(load_int64(to + i) + load_int64(from + i), to + i);
  }
}

// The number at `at`, as float64: rounded beyond 2^53.
SHOAL_INLINE double int64_as_double(const float* at) noexcept {
  return static_cast<double>(static_cast<std::int64_t>(load_int64(at)));
}

}  // namespace shoal
