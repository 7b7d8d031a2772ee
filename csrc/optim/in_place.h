// InPlace: steps wide rows of one table where they are stored.
//
//   row r       floats, column after column, then the row's own number if the rule has one (table/layout.h):
//               element e of column k at rows[r][k * dim + e]
//   gradient    grads[r * dim + e]; noise is made from the row's hash (base/noise.h)
//
// Why. A Block (optim/block.h) copies each column in and out, and makes passes over all of it for the noise,
// the zeros and the numbers that are not finite. Here a row's new numbers are computed in scratch memory, in
// registers if dim is one of the usual ones, and overwrite the row once all of them are known to be finite.
// The same formula serves both: a rule's element is one function, so the bits are the same.
//
//   a row whose gradient is all zero keeps every bit
//   a row whose gradient or whose new numbers are not all finite keeps every bit, and is counted
//
// Threads: the caller has locked the rows.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/known_dim.h"
#include "base/noise.h"
#include "base/prefetch.h"
#include "base/simd.h"

namespace shoal {

struct InPlace {
  // Below it a loop over a row is too short for wide instructions, while a loop over a column of a Block is
  // long enough.
  static constexpr std::size_t kMinDim = 8;

  std::span<std::byte* const> rows;
  std::size_t dim = 0;
  const float* grads = nullptr;
  const std::uint64_t* hashes = nullptr;
  std::uint64_t noise = 0;          // base/noise.h: step_noise of the push
  std::uint64_t step = 0;           // the table's step number, 1 for the first push
  float* scratch = nullptr;         // scratch memory for one row
  PrefetchCursor* ahead = nullptr;  // prefetched row by row
};

namespace in_place {

// Whether a gradient changes its row, and the largest of its numbers and the row's new ones, as bits,
// unsigned.
struct Sizes {
  std::uint32_t any = 0;
  std::uint32_t largest = 0;

  SHOAL_INLINE void see(float x) noexcept {
    largest = std::max(largest, std::bit_cast<std::uint32_t>(x) & 0x7fffffffU);
  }
  SHOAL_INLINE void see_slope(float g) noexcept {
    any |= std::bit_cast<std::uint32_t>(g) & 0x7fffffffU;
    see(g);
  }
  SHOAL_INLINE bool finite() const noexcept { return largest < 0x7f800000U; }
};

// kDim is dim, or 0 if it is not one of the usual ones.
template <std::size_t kDim, std::size_t kColumns, bool kState, class RowRule>
SHOAL_INLINE std::size_t step_all(const InPlace& input, const RowRule& rule) noexcept {
  const std::size_t dim = kDim != 0 ? kDim : input.dim;
  const std::size_t numbers = kColumns * dim + (kState ? 1 : 0);
  alignas(kCacheLine) std::array<float, kColumns * kDim + 1> near;
  float* const __restrict scratch = kDim != 0 ? near.data() : input.scratch;
  PrefetchCursor ahead = *input.ahead;
  std::size_t dropped = 0;
  for (std::size_t r = 0; r < input.rows.size(); ++r) {
    ahead.next();
    ahead.next_row();
    float* const row = reinterpret_cast<float*>(input.rows[r]);
    const float* const grads = input.grads + r * dim;
    const std::uint32_t noise = row_noise(input.noise, input.hashes[r]);
    Sizes sizes;
    float state = 0.0F;
    if constexpr (kState) {
      state = row[kColumns * dim];
    }
    const auto element = rule(grads, row, dim, noise, state);
    if constexpr (kState) {
      scratch[kColumns * dim] = state;
      sizes.see(state);
    }
    for (std::size_t e = 0; e < dim; ++e) {
      std::array<float, kColumns> x;
      for (std::size_t k = 0; k < kColumns; ++k) {
        x[k] = row[k * dim + e];
      }
      element(grads[e], element_noise(noise, static_cast<std::uint32_t>(e)), x);
      sizes.see_slope(grads[e]);
      for (std::size_t k = 0; k < kColumns; ++k) {
        scratch[k * dim + e] = x[k];
        sizes.see(x[k]);
      }
    }
    if (sizes.any == 0) [[unlikely]] {
      continue;
    }
    if (!sizes.finite()) [[unlikely]] {
      ++dropped;
      continue;
    }
    std::memcpy(row, scratch, numbers * sizeof(float));
  }
  *input.ahead = ahead;
  return dropped;
}

// For rules with the same step for all rows.
template <class Element>
struct Alike {
  Element element;
  SHOAL_INLINE const Element& operator()(const float*, const float*, std::size_t, std::uint32_t,
                                         float&) const noexcept {
    return element;
  }
};

// Steps all rows; returns the number of those that were not finite and stayed. rule(grads, row, dim, noise,
// state) reads a row, updates its own number, and returns an element's step: element(g, noise, columns), with
// the element's numbers as an array.
template <std::size_t kColumns, bool kState = false, class RowRule>
SHOAL_INLINE std::size_t step(const InPlace& input, const RowRule& rule) noexcept {
  return with_dim<8, 16, 32, 64>(
      input.dim, [&](auto known) SHOAL_ALWAYS { return step_all<known, kColumns, kState>(input, rule); });
}

}  // namespace in_place

}  // namespace shoal
