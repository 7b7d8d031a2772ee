// Reductions: functions over all rows of a table, and changes to all of them, computed where the rows are
// stored: slot by slot, in hash order, in float64. The caller combines the results of all slots in slot
// order, so the bits depend on the rows and the number of slots alone. docs/wire-format.md (REDUCE) lists the
// functions, their parameters and results.
//
// topk returns one result for all its slots: at most k pairs (norm, the hash's 64 bits), the largest norm
// first, then the smaller key: a total order, so results are combined by merging these lists.
//
// Rules that derive their weights (FTRL, GroupFTRL) keep n, and move z so that the new weight is read; a
// weight of 0 stays 0 and keeps its z, and one that becomes 0 keeps the z of greatest magnitude that gives 0.
// For rows that are pairs (Proximal) only the weight is read, and no function changes them.
//
// Threads: as the Shard's. The Shard's pool divides the slots; each slot is read as of one moment.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  kDigest = 7,
  kMap = 8,
  kApply = 9,
  kRate = 10
};

inline constexpr std::size_t kMaxTopK = std::size_t{1} << 20U;

// True if the function changes rows: a repeated request must not repeat the call.
bool changes(Function function) noexcept;

// The results of the slots [first, end), concatenated. Throws std::invalid_argument, with nothing changed,
// for an unknown function or wrong parameters.
std::vector<double> reduce(Shard& shard, Function function, std::span<const double> parameters,
                           std::size_t first, std::size_t end);

// The result of several ranges of slots, from the results of each, in the order of their slots.
std::vector<double> join(Function function, std::span<const double> parameters,
                         std::span<const std::vector<double>> parts);

// Changes the weights of all rows in memory of the slots [first, end): change(weights) modifies the weights
// of some rows in place. Weights that keep their bits keep their state; others are moved by the optimizer's
// move(), or set. Returns the number of changed rows per slot. As in a push, a row that would not be finite
// is left unchanged and counted. With a pool of one thread std::bad_alloc changes nothing: all memory is
// allocated first.
std::vector<std::size_t> transform_weights(Shard& shard, std::size_t first, std::size_t end,
                                           const std::function<void(std::span<float>)>& change);

}  // namespace shoal
