// InPlace: wide rows of one table, stepped where they stand.
//
//   row r       floats, one column behind the other, then the row's own number where the rule has one (table/layout.h):
//               element e of column k at rows[r][k * dim + e]
//   gradient    grads[r * dim + e]; noise is made from the row's hash (base/noise.h)
//
// Idea. A Block (optim/block.h) costs a copy of each column there and back, and passes over all of it for the noise, the
// zeros and the numbers that are not finite. Here a row's new numbers are computed beside it, in registers where dim is
// a usual one, and written over it once all of them are known to be finite. The same formula serves both: a rule's element
// is one function, so the bits are the same.
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
  // Below it a loop over a row is too short for wide instructions, and one over a column of a Block is not.
  static constexpr std::size_t kMinDim = 8;

  std::span<std::byte* const> rows;
  std::size_t dim = 0;
  const float* grads = nullptr;
  const std::uint64_t* hashes = nullptr;
  std::uint64_t noise = 0;          // base/noise.h: step_noise of the push
  std::uint64_t step = 0;           // the table's step number, 1 for the first push
  float* beside = nullptr;          // room for a row
  PrefetchCursor* ahead = nullptr;  // asked for row by row
};

namespace in_place {

// Whether a gradient moves its row, and how large its numbers and the row's new ones are, as bits without the sign.
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

// kDim is dim, or 0 where it is none of the usual ones.
template <std::size_t kDim, std::size_t kColumns, bool kState, class RowRule>
SHOAL_INLINE std::size_t step_all(const InPlace& given, const RowRule& rule) noexcept {
  const std::size_t dim = kDim != 0 ? kDim : given.dim;
  const std::size_t numbers = kColumns * dim + (kState ? 1 : 0);
  alignas(kCacheLine) std::array<float, kColumns * kDim + 1> near;
  float* const __restrict beside = kDim != 0 ? near.data() : given.beside;
  PrefetchCursor ahead = *given.ahead;
  std::size_t dropped = 0;
  for (std::size_t r = 0; r < given.rows.size(); ++r) {
    ahead.next();
    ahead.next_row();
    float* const row = reinterpret_cast<float*>(given.rows[r]);
    const float* const grads = given.grads + r * dim;
    const std::uint32_t noise = row_noise(given.noise, given.hashes[r]);
    Sizes sizes;
    float state = 0.0F;
    if constexpr (kState) {
      state = row[kColumns * dim];
    }
    const auto element = rule(grads, row, dim, noise, state);
    if constexpr (kState) {
      beside[kColumns * dim] = state;
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
        beside[k * dim + e] = x[k];
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
    std::memcpy(row, beside, numbers * sizeof(float));
  }
  *given.ahead = ahead;
  return dropped;
}

// For rules that move every element alike, whatever its row.
template <class Element>
struct Alike {
  Element element;
  SHOAL_INLINE const Element& operator()(const float*, const float*, std::size_t, std::uint32_t,
                                         float&) const noexcept {
    return element;
  }
};

// Steps all rows; returns how many were not finite and stayed. rule(grads, row, dim, noise, state) looks at a row, moves
// its own number, and gives what moves one element: element(g, noise, columns), the element's numbers as an array.
template <std::size_t kColumns, bool kState = false, class RowRule>
SHOAL_INLINE std::size_t step(const InPlace& given, const RowRule& rule) noexcept {
  return with_dim<8, 16, 32, 64>(
      given.dim, [&](auto known) SHOAL_ALWAYS { return step_all<known, kColumns, kState>(given, rule); });
}

}  // namespace in_place

}  // namespace shoal
