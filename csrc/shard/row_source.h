// RowSource: where the rows of a shard are that are not in memory, as a tier implements it (tier/tier.h). The
// shard computes in memory alone: it asks its source for the rows of a call, and then processes the call as
// if it had no source.
//
// Threads: a RowSource is the lock of its shard's turns (std::unique_lock<RowSource>). Every call of such a
// shard has a turn, so calls run one at a time, each by all threads of the pool. A turn is taken before all
// locks of the shard. A save takes slots in turns: a change waits for a save before its turn, never in it.
//
// Invariants
//   I1  A row is brought and evicted exactly as it is. This is no change of the table: nothing is logged for
//       a save, counted or recorded as changed (shard/residency.h).
//   I2  What a turn has brought stays in memory until the turn ends.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "shard/row_locations.h"
#include "shard/tier_stats.h"

namespace shoal {

struct SlotSlices;

class RowSource {
 public:
  RowSource() = default;
  virtual ~RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;

  // What is done with the rows of a batch; kCreates: missing ones may be created.
  enum class Use : std::uint8_t { kPrefetches, kReads, kErases, kCreates };

  // Begins and ends a turn of the calling thread.
  virtual void lock() = 0;
  virtual void unlock() noexcept = 0;

  // In a turn. Slots are given by their places among those of the shard.

  // Brings the rows of the turn's batch, which must outlive the turn. Returns where they are: in `locations`,
  // or if that is null in memory of the source. If it throws, no row has been lost or changed.
  virtual RowLocations& bring(const SlotSlices& batch, RowLocations* locations, Use use) = 0;
  // Calls use() with all rows of a slot in memory; `changes`: it may change them.
  virtual void with_slot(std::size_t place, bool changes, const std::function<void()>& use) = 0;
  // Begins to read the rows of a later call, and locates those in memory.
  virtual void prefetch(const SlotSlices& batch, RowLocations* locations) = 0;

  // The number of a slot's rows that are not in memory.
  virtual std::size_t rows_elsewhere(std::size_t place) const noexcept = 0;
  virtual TierStats stats() const = 0;
  // "" if all invariants hold, else the broken one.
  virtual std::string verify() = 0;
};

}  // namespace shoal
