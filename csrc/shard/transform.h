// A change of all weights of slots in place, as decay and shrink make it (shard/reductions.h).
//
// Threads: as the Shard's; the pool divides the slots.

#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "shard/shard.h"

namespace shoal {

// Changes the weights of all rows in memory of the slots [first, end): change(weights) modifies the weights
// of some rows in place. Weights that keep their bits keep their state; others are moved by the optimizer's
// move(), or set. Returns the number of changed rows per slot. As in a push, a row that would not be finite
// is left unchanged and counted. With a pool of one thread std::bad_alloc changes nothing: all memory is
// allocated first.
std::vector<std::size_t> transform_weights(Shard& shard, std::size_t first, std::size_t end,
                                           const std::function<void(std::span<float>)>& change);

}  // namespace shoal
