// Row flags: simple loops over the rows of a Block, around a rule's step.
//
//   mark_moving       flags rows with a non-zero gradient element
//   mark_finite       flags rows whose elements are all finite
//   fill_noise        the noise of each element, from the step and the row's hash (base/noise.h)
//
// Threads: functions of their arguments.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/noise.h"
#include "base/simd.h"

namespace shoal {

inline constexpr std::uint32_t kMagnitude = 0x7fffffffU;
inline constexpr std::uint32_t kExponent = 0x7f800000U;  // all ones: infinity or NaN

SHOAL_INLINE std::uint32_t is_finite(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kExponent) != kExponent);
}

SHOAL_INLINE std::uint32_t is_nonzero(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kMagnitude) != 0);
}

// Sets moves[r] if some element of row r is not zero.
SHOAL_CLONES inline void mark_moving(const float* x, std::size_t rows, std::size_t dim,
                                     std::uint32_t* moves) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      moves[r] = is_nonzero(x[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    std::uint32_t any = 0;
    for (std::size_t e = 0; e < dim; ++e) {
      any |= is_nonzero(x[r * dim + e]);
    }
    moves[r] = any;
  }
}

// Clears finite[r] unless all elements of row r are finite.
SHOAL_CLONES inline void mark_finite(const float* x, std::size_t rows, std::size_t dim,
                                     std::uint32_t* finite) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      finite[r] &= is_finite(x[r]);
    }
    return;
  }
  // Nearly always all rows are finite; one flat loop establishes that much faster than a loop per row.
  std::uint32_t are_finite = 1;
  for (std::size_t i = 0; i < rows * dim; ++i) {
    are_finite &= is_finite(x[i]);
  }
  if (are_finite != 0) {
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    are_finite = 1;
    for (std::size_t e = 0; e < dim; ++e) {
      are_finite &= is_finite(x[r * dim + e]);
    }
    finite[r] &= are_finite;
  }
}

SHOAL_CLONES inline void fill_noise(std::span<const std::uint64_t> hashes, std::size_t dim,
                                    std::uint64_t shared, std::uint32_t* noise) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < hashes.size(); ++r) {
      noise[r] = row_noise(shared, hashes[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    const std::uint32_t row = row_noise(shared, hashes[r]);
    for (std::size_t e = 0; e < dim; ++e) {
      noise[r * dim + e] = element_noise(row, static_cast<std::uint32_t>(e));
    }
  }
}

}  // namespace shoal
