// TableSpec: the description of a table, identical on every server and in every manifest; and what a shard's
// calls take.
//
// Threads: values.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/half.h"
#include "optim/init.h"
#include "optim/optimizer.h"
#include "policy/lifecycle.h"

namespace shoal {

struct TableSpec {
  std::size_t dim;
  Dtype dtype;
  Optimizer optimizer;
  Init init;
  std::uint64_t seed;  // of the rounding noise
  Lifecycle lifecycle = {};
};

// A batch divided by the slots of a shard: hashes ascend strictly, its slot number s is [offsets[s],
// offsets[s + 1]).
struct SlotSlices {
  std::span<const std::uint64_t> hashes;
  std::span<const std::uint64_t> offsets;

  std::span<const std::uint64_t> of(std::size_t place) const noexcept {
    return hashes.subspan(offsets[place], offsets[place + 1] - offsets[place]);
  }
};

// The clock of a push and the number of occurrences of its keys (policy/lifecycle.h).
struct OccurrenceCounts {
  std::span<const std::uint32_t> counts = {};  // per hash, at least 1; empty: 1 each
  std::uint32_t clock = 0;                     // the store's
};

// One lock per slot, or one lock for all slots, which is cheaper if calls are serialized anyway, as a data
// loop's are: calls of 1000 keys take 0.8 of the time and two thirds of the instructions (bench/table.md,
// "Wide rows").
enum class Locks : std::uint8_t { kBySlot, kOne };

// Memory for the intermediate values of a call, so that small batches allocate nothing. Any shards may use
// it, one call at a time.
class ShardScratch {
 private:
  friend struct Workspace;
  Buffer<std::byte> bytes_;
};

}  // namespace shoal
