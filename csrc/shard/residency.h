// ShardResidency: which rows of a shard are in memory. With it a RowSource (shard/row_source.h) brings rows
// and takes them away.
//
// Invariants
//   I1  This is not a change of the table: nothing is logged for a save, counted or recorded as changed.
//   I2  A row is in memory exactly as it was inserted.
//
// Threads: in a turn. Calls for different slots, which are given by their places among those of the shard,
// may run at the same time. Saves may end meanwhile.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "shard/row_locations.h"
#include "shard/shard.h"
#include "table/slot_table.h"

namespace shoal {

class ShardResidency {
 public:
  explicit ShardResidency(Shard& shard) noexcept : core_(shard.core()) {}

  std::size_t rows(std::size_t place) const noexcept { return table(place).size(); }
  std::size_t bytes(std::size_t place) const noexcept { return table(place).bytes(); }
  std::size_t bytes_with(std::size_t place, std::size_t more) const noexcept {
    return table(place).bytes_with(more, false);
  }

  // Prepares locations of a batch for locate(), which records all rows of the slots with places from `first`
  // to `end`: those that are not known are found. Then locations.rows() are null where rows are absent.
  void prepare(const SlotSlices& batch, RowLocations& locations) const { core_.known(batch, &locations); }
  void locate(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end) const;

  std::vector<SlotTable::Entry> entries(std::size_t place) const { return table(place).entries(); }
  bool has(std::size_t place, std::uint64_t hash) const { return table(place).find_one(hash) != nullptr; }
  void make_room(std::size_t place, std::size_t more) const;
  // Adds a row that is absent, of the bytes given. Requires make_room().
  void insert(std::size_t place, std::uint64_t hash, const std::byte* row) const;
  // Drops all rows but these, which ascend, and returns their memory. std::bad_alloc changes nothing.
  void retain(std::size_t place, std::span<const SlotTable::Entry> rows) const;

 private:
  SlotTable& table(std::size_t place) const noexcept { return core_.states[place]->table; }

  ShardCore& core_;
};

}  // namespace shoal
