// sum_rows: sums the rows of each unique hash in order of occurrence, in float64, rounded once.
//
//   row_of(position)  the dim floats of the key at that position
//   round(sum)        rounds a float64 sum to float: Unscaled, or Divided for a mean
//   sum_range         sums the hashes from `begin` to `end` into `out`, for callers that use them while they
//                     are in the cache
//
// Integers in pairs of floats (base/int64_pairs.h) are added modulo 2^64 instead: `round` is Integers.
//
// The row of a hash that occurs once is copied bit for bit unless it is divided: a sum starts with its first
// row, not with 0.
//
// Threads: each thread sums a range of hashes; the rows of one hash are never divided, so the bits do not
// depend on the pool.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/int64_pairs.h"
#include "base/known_dim.h"
#include "base/threads.h"

namespace shoal {

struct Unscaled {
  static constexpr bool kKeepsBits = true;  // if there is one row
  float operator()(double sum) const noexcept { return static_cast<float>(sum); }
};

struct Divided {
  static constexpr bool kKeepsBits = false;
  double divisor;
  float operator()(double sum) const noexcept { return static_cast<float>(sum / divisor); }
};

struct Integers {};

inline void check_pairs(std::size_t dim, Elements elements) {
  SHOAL_CHECK(elements == Elements::kFloat32 || dim % kInt64Floats == 0,
              "an int64 takes two floats: dim must be even, got " + std::to_string(dim));
}

// The hashes from `begin` to `end`, rows of integers.
template <class RowOf>
void sum_integers(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
                  std::size_t begin, std::size_t end, std::size_t dim, const RowOf& row_of,
                  float* out) noexcept {
  with_dim<2, 8, 16>(dim, [&](auto known) SHOAL_ALWAYS {
    constexpr std::size_t kAhead = 16;  // rows are read in random order: prefetch them
    const std::size_t width = known == 0 ? dim : known;
    for (std::size_t u = begin; u < end; ++u) {
      float* const to = out + (u - begin) * width;
      for (std::size_t j = group_offsets[u]; j < group_offsets[u + 1]; ++j) {
        if (j + kAhead < order.size()) {
          __builtin_prefetch(row_of(order[j + kAhead]));
        }
        const float* const row = row_of(order[j]);
        if (j == group_offsets[u]) {
          std::copy_n(row, width, to);
        } else {
          add_int64(row, to, width);
        }
      }
    }
  });
}

// The hashes from `begin` to `end`, dim 1.
template <class RowOf, class Round>
void sum_numbers(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
                 std::size_t begin, std::size_t end, const RowOf& row_of, const Round& round,
                 float* out) noexcept {
  for (std::size_t u = begin; u < end; ++u) {
    std::size_t j = group_offsets[u];
    auto sum = static_cast<double>(*row_of(order[j]));
    for (++j; j < group_offsets[u + 1]; ++j) {
      sum += static_cast<double>(*row_of(order[j]));
    }
    out[u - begin] = round(sum);
  }
}

// The same for a dim known at compile time: a row's sums stay in registers.
template <std::size_t kDim, class RowOf, class Round>
void sum_fixed(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
               std::size_t begin, std::size_t end, const RowOf& row_of, const Round& round,
               float* out) noexcept {
  constexpr std::size_t kAhead = 16;  // rows are read in random order: prefetch them
  constexpr std::size_t kLineFloats = 16;
  for (std::size_t u = begin; u < end; ++u) {
    float* const to = out + (u - begin) * kDim;
    const std::size_t last = group_offsets[u + 1];
    std::size_t j = group_offsets[u];
    const auto next_row = [&] {
      if (j + kAhead < order.size()) {
        const float* const ahead = row_of(order[j + kAhead]);
        for (std::size_t d = 0; d < kDim; d += kLineFloats) {
          __builtin_prefetch(ahead + d);
        }
      }
      return row_of(order[j++]);
    };
    const float* const first = next_row();
    if (Round::kKeepsBits && j == last) {
      std::copy_n(first, kDim, to);
      continue;
    }
    double sums[kDim];
    for (std::size_t d = 0; d < kDim; ++d) {
      sums[d] = static_cast<double>(first[d]);
    }
    while (j < last) {
      const float* const row = next_row();
      for (std::size_t d = 0; d < kDim; ++d) {
        sums[d] += static_cast<double>(row[d]);
      }
    }
    for (std::size_t d = 0; d < kDim; ++d) {
      to[d] = round(sums[d]);
    }
  }
}

// The same for any dim, in strips of columns whose sums stay in the L1 cache.
template <class RowOf, class Round>
void sum_strips(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
                std::size_t begin, std::size_t end, std::size_t dim, const RowOf& row_of, const Round& round,
                float* out) noexcept {
  constexpr std::size_t kStrip = 256;
  constexpr std::size_t kAhead = 12;  // rows are read in random order: prefetch them,
  constexpr std::size_t kFewFloats =
      64;  // at least their first lines; the hardware prefetches the rest of a long row
  constexpr std::size_t kLineFloats = 16;
  double sums[kStrip];
  for (std::size_t u = begin; u < end; ++u) {
    for (std::size_t left = 0; left < dim; left += kStrip) {
      const std::size_t width = std::min(kStrip, dim - left);
      float* const to = out + (u - begin) * dim + left;
      const std::size_t last = group_offsets[u + 1];
      std::size_t j = group_offsets[u];
      const auto next_row = [&] {
        if (j + kAhead < order.size()) {
          const float* const ahead = row_of(order[j + kAhead]) + left;
          for (std::size_t d = 0; d < std::min(width, kFewFloats); d += kLineFloats) {
            __builtin_prefetch(ahead + d);
          }
        }
        return row_of(order[j++]) + left;
      };
      const float* const first = next_row();
      if (Round::kKeepsBits && j == last) {
        std::copy_n(first, width, to);
        continue;
      }
      for (std::size_t d = 0; d < width; ++d) {
        sums[d] = static_cast<double>(first[d]);
      }
      while (j < last) {
        const float* const row = next_row();
        for (std::size_t d = 0; d < width; ++d) {
          sums[d] += static_cast<double>(row[d]);
        }
      }
      for (std::size_t d = 0; d < width; ++d) {
        to[d] = round(sums[d]);
      }
    }
  }
}

template <class RowOf, class Round>
void sum_range(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
               std::size_t begin, std::size_t end, std::size_t dim, const RowOf& row_of, const Round& round,
               float* out) noexcept {
  if constexpr (std::is_same_v<Round, Integers>) {
    sum_integers(order, group_offsets, begin, end, dim, row_of, out);
  } else {
    with_dim<1, 8, 16, 32>(dim, [&](auto known) {
      if constexpr (known == 0) {
        sum_strips(order, group_offsets, begin, end, dim, row_of, round, out);
      } else if constexpr (known == 1) {
        sum_numbers(order, group_offsets, begin, end, row_of, round, out);
      } else {
        sum_fixed<known>(order, group_offsets, begin, end, row_of, round, out);
      }
    });
  }
}

template <class RowOf, class Round = Unscaled>
void sum_rows(std::span<const std::uint32_t> order, std::span<const std::uint32_t> group_offsets,
              std::size_t dim, const RowOf& row_of, std::span<float> out, ThreadPool& pool,
              const Round& round = {}) {
  constexpr std::size_t kMin = 16384;  // numbers per part, at least
  const std::size_t n = order.size();
  const std::size_t unique = group_offsets.size() - 1;
  const std::size_t threads = pool.threads();
  const Partition partition{n, parts_for(n * dim, kMin, threads == 1 ? 1 : 4 * threads)};
  // The hashes whose first position is in the piece: it ends at the end of a hash.
  const auto hash_at = [&](std::size_t position) {
    return static_cast<std::size_t>(std::lower_bound(group_offsets.begin(), group_offsets.end() - 1,
                                                     static_cast<std::uint32_t>(position)) -
                                    group_offsets.begin());
  };
  pool.run(partition.parts, [&](std::size_t part) {
    const std::size_t begin = part == 0 ? 0 : hash_at(partition.begin(part));
    const std::size_t end = part + 1 == partition.parts ? unique : hash_at(partition.begin(part + 1));
    sum_range(order, group_offsets, begin, end, dim, row_of, round, out.data() + begin * dim);
  });
}

}  // namespace shoal
