// sum_rows: the rows of each unique hash, added up in order of occurrence, in float64, rounded once.
//
//   row_of(place)  where the dim floats of the key at that place lie
//
// A hash that occurs once gets its row bit for bit: a sum starts with its first row, not with zero.
//
// Threads: the pool takes neighbouring hashes; a hash is never divided, so the bits do not depend on the pool.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/simd.h"
#include "base/threads.h"

namespace shoal {

// sums[d] += row[d]
SHOAL_INLINE void add_row(const float* row, double* sums, std::size_t dim) noexcept {
  for (std::size_t d = 0; d < dim; ++d) {
    sums[d] += static_cast<double>(row[d]);
  }
}

// The hashes from `begin` to `end`, dim 1.
template <class RowOf>
void sum_numbers(std::span<const std::uint32_t> order, std::span<const std::uint32_t> firsts, std::size_t begin,
                 std::size_t end, const RowOf& row_of, float* out) noexcept {
  for (std::size_t u = begin; u < end; ++u) {
    std::size_t j = firsts[u];
    auto sum = static_cast<double>(*row_of(order[j]));
    for (++j; j < firsts[u + 1]; ++j) {
      sum += static_cast<double>(*row_of(order[j]));
    }
    out[u] = static_cast<float>(sum);
  }
}

// The same for any dim, in strips of columns whose sums stay in registers and the first-level cache.
template <class RowOf>
void sum_strips(std::span<const std::uint32_t> order, std::span<const std::uint32_t> firsts, std::size_t begin,
                std::size_t end, std::size_t dim, const RowOf& row_of, float* out) noexcept {
  constexpr std::size_t kStrip = 256;
  constexpr std::size_t kAhead = 8;  // rows come from anywhere: ask for the lines early
  double sums[kStrip];
  for (std::size_t u = begin; u < end; ++u) {
    for (std::size_t left = 0; left < dim; left += kStrip) {
      const std::size_t width = std::min(kStrip, dim - left);
      std::size_t j = firsts[u];
      const float* first = row_of(order[j]) + left;
      float* to = out + u * dim + left;
      if (j + kAhead < order.size()) {
        __builtin_prefetch(row_of(order[j + kAhead]) + left);
      }
      if (firsts[u + 1] - j == 1) {
        std::copy_n(first, width, to);
        continue;
      }
      for (std::size_t d = 0; d < width; ++d) {
        sums[d] = static_cast<double>(first[d]);
      }
      for (++j; j < firsts[u + 1]; ++j) {
        add_row(row_of(order[j]) + left, sums, width);
      }
      for (std::size_t d = 0; d < width; ++d) {
        to[d] = static_cast<float>(sums[d]);
      }
    }
  }
}

template <class RowOf>
void sum_rows(std::span<const std::uint32_t> order, std::span<const std::uint32_t> firsts, std::size_t dim,
              const RowOf& row_of, std::span<float> out, Pool& pool) {
  constexpr std::size_t kLeast = 16384;  // numbers a part adds up at least
  const std::size_t n = order.size();
  const std::size_t unique = firsts.size() - 1;
  const std::size_t threads = pool.threads();
  const Pieces pieces{n, parts_for(n * dim, kLeast, threads == 1 ? 1 : 4 * threads)};
  // A piece of the places ends at the end of a hash: hashes whose first place is in the piece.
  const auto hash_at = [&](std::size_t place) {
    return static_cast<std::size_t>(
        std::lower_bound(firsts.begin(), firsts.end() - 1, static_cast<std::uint32_t>(place)) - firsts.begin());
  };
  pool.run(pieces.parts, [&](std::size_t part) {
    const std::size_t begin = part == 0 ? 0 : hash_at(pieces.begin(part));
    const std::size_t end = part + 1 == pieces.parts ? unique : hash_at(pieces.begin(part + 1));
    if (dim == 1) {
      sum_numbers(order, firsts, begin, end, row_of, out.data());
    } else {
      sum_strips(order, firsts, begin, end, dim, row_of, out.data());
    }
  });
}

}  // namespace shoal
