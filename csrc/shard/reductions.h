// Functions: questions about all rows of a table and changes to all of them, answered where the rows are.
//
// Idea. A function looks at one slot at a time, in hash order, in float64, and answers some numbers for it. Who asked puts
// the answers of all slots together in slot order. So the bits depend on the rows and the slots alone: not on threads, nor
// on how many servers share the slots.
//
//   function   parameters         answer for each slot
//   sum        -                  a number for each weight of a row: its sum over the rows
//   norm       order: 1, 2, inf   sum of |w|, sum of w^2, greatest |w|
//   count      above              how many rows have a Euclidean norm above it
//   topk       k                  see below
//   decay      factor in (0, 1]   w = factor * w, rounded once; how many rows that changed
//   shrink     l1                 w = sgn(w) * max(|w| - l1, 0), rounded once; how many rows that changed
//   digest     -                  four numbers of 32 bits: the low and high halves of the two sums of Shard::digest
//
// topk answers for all its slots at once: pairs (norm, the hash's 64 bits), the largest norm first, of equal ones the
// smaller key, k at most. Order is total, so answers are merged by merging these lists.
//
// Rules that derive their weights (FTRL, GroupFTRL) keep n, and move z to where the new weight is read; a weight that is
// 0 stays 0 with all its evidence, and one that becomes 0 keeps as much evidence as a 0 can have.
// Of rows that are pairs (Proximal) only the weight is looked at, and no function changes them.
//
// Threads: as the Shard's. The Shard's pool shares the slots; a slot is seen as it is at one moment.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shard/shard.h"

namespace shoal {

enum class Function : std::uint32_t {
  kSum = 1,
  kNorm = 2,
  kCount = 3,
  kTopK = 4,
  kDecay = 5,
  kShrink = 6,
  kDigest = 7
};

inline constexpr std::size_t kMaxTopK = std::size_t{1} << 20U;

// Whether it changes rows: a repeated request must not be answered by a repeated call.
bool changes(Function function) noexcept;

// The answer of the slots [first, end), one behind the other. An unknown function, or parameters that are not its own:
// std::invalid_argument, nothing changed.
std::vector<double> reduce(Shard& shard, Function function, std::span<const double> parameters,
                           std::size_t first, std::size_t end);

}  // namespace shoal
