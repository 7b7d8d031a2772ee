// Count-min sketch (Cormode, Muthukrishnan, J. Algorithms 2005): d rows of w counters, each with a hash
// function.
//
//   add       row r: counter[r][position(r, key)] += count, modulo 2^64
//   estimate  min over r of counter[r][position(r, key)]
//
// Hash functions. Multiply-add-shift (Dietzfelbinger, STACS 1996): the upper half of a x + b modulo 2^128,
// scaled to 0..w-1, with a and b of 128 bits from the seed. It is strongly universal for keys of 64 bits,
// which is what the error bounds assume, and the rows are independent of each other; double hashing would
// give neither.
//
// Threads: rows are shared out. No two threads write one counter, and integer sums do not depend on the
// order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/threads.h"

namespace shoal {

struct CountMin {
  std::uint64_t seed;
  std::size_t depth;
  std::size_t width;
};

// Adds counts[i], or 1 if there are no counts, for each key. `counters` has depth x width numbers, row by
// row, or more.
void count_min_add(const CountMin& sketch, std::span<const std::uint64_t> keys,
                   std::span<const std::int64_t> counts, std::span<std::int64_t> counters, ThreadPool& pool);

// Writes the positions in `counters` of each key: `out` has one row for each row of the sketch, with a number
// for each key.
void count_min_positions(const CountMin& sketch, std::span<const std::uint64_t> keys,
                         std::span<std::int64_t> out, ThreadPool& pool);

}  // namespace shoal
