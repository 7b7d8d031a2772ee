// ShardResidency: which rows of a shard are in memory, for a tier that keeps others on disk (tier/tiered_shard.h).
//
// Rows come and go here without a change of the table: nothing is logged for a save, counted or recorded as changed. A caller who
// makes sure that all rows of a batch are in memory before the shard processes it gets what a shard with all rows in memory
// would have returned.
//
// Threads: calls for different slots may run at the same time; they, and the shard's own calls, exclude each other by the caller's
// lock, except that saves may end meanwhile.

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
  explicit ShardResidency(Shard& shard) noexcept : shard_(shard) {}

  // As the shard does at the start of a call.
  void check(const SlotSlices& batch) const { shard_.check_batch(batch); }
  void check_process() const { shard_.check_process(); }
  void wait_for_save(std::size_t rows) const {
    if (shard_.is_saving()) {
      shard_.wait_for_slots(rows, true);
    }
  }
  std::vector<std::uint64_t> hashes_of(std::size_t rows, std::span<const std::byte> section) const {
    return shard_.hashes_of(rows, section);
  }

  // Slots are given by their places among those here.
  std::size_t rows(std::size_t place) const noexcept { return table(place).size(); }
  std::size_t bytes(std::size_t place) const noexcept { return table(place).bytes(); }
  std::size_t bytes_with(std::size_t place, std::size_t more) const noexcept {
    return table(place).bytes_with(more, false);
  }

  // Prepares locations of a batch for locate(), which records all rows of the slots with places from `first` to `end`: those that
  // are not known are found. Then locations.rows() are null where rows are absent.
  void prepare(const SlotSlices& batch, RowLocations& locations) const { shard_.known(batch, &locations); }
  void locate(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end) const;

  std::vector<SlotTable::Entry> entries(std::size_t place) const { return table(place).entries(); }
  bool has(std::size_t place, std::uint64_t hash) const { return table(place).find_one(hash) != nullptr; }
  void make_room(std::size_t place, std::size_t more) const;
  // Adds a row that is absent, of the bytes given. Requires make_room().
  void insert(std::size_t place, std::uint64_t hash, const std::byte* row) const;
  // Drops all rows but these, which ascend, and returns their memory. std::bad_alloc changes nothing.
  void retain(std::size_t place, std::span<const SlotTable::Entry> rows) const;

 private:
  SlotTable& table(std::size_t place) const noexcept { return shard_.tables_[place]->table; }

  Shard& shard_;
};

}  // namespace shoal
