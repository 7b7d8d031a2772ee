// ShardCopy: the whole state of a shard as of one moment, as bytes, slot by slot, while the shard keeps
// changing.
//
// Algorithm. Copy-on-write snapshot (shard/snapshot.h). Small state is copied at the beginning: step,
// counters, and for each slot its capacity and its dirty ranges. Rows and admission filters are copied when
// the slot is taken.
//
// Equal states have equal bytes. restore() of them into a new shard of the same description, first the table,
// then each slot, makes an equal shard, which goes on alike: with the counters of changes, and the capacities
// on which decisions under a budget depend.
//
// Threads: as Snapshot.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/byte_stream.h"
#include "shard/shard.h"
#include "shard/snapshot.h"

namespace shoal {

class ShardCopy {
 public:
  // As for a Snapshot: requires paused writers. std::invalid_argument: the shard has a snapshot.
  explicit ShardCopy(std::shared_ptr<Shard> shard);

  const Shard& shard() const noexcept { return *shard_; }
  // Of the table.
  const std::vector<std::byte>& table() const noexcept { return table_; }
  // Of all slots, without filters and dirty ranges.
  std::uint64_t bytes() const noexcept;
  // Appends the state of a slot, each once. SnapshotLostError, after which the copy is unusable.
  void take(Slot slot, ByteWriter& out);

  // What table() has, and then what take() has appended of each slot. std::invalid_argument, and
  // MemoryBudgetExceededError, leave the shard unusable.
  static void restore(Shard& shard, ByteReader& in);
  static void restore(Shard& shard, Slot slot, ByteReader& in);

 private:
  // The bytes of a slot before and after its rows and its filter.
  struct SlotHead {
    std::vector<std::byte> bytes;
    std::vector<std::byte> ranges;
  };
  SlotHead head_of(const SlotState& state) const;
  static void restore_resident(ShardCore& core, Slot slot, ByteReader& in);

  std::shared_ptr<Shard> shard_;
  std::vector<std::byte> table_;
  std::vector<SlotHead> heads_;
  std::optional<Snapshot> snapshot_;
};

}  // namespace shoal
