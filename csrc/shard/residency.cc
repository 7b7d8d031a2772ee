#include "shard/residency.h"

#include <cstring>
#include <mutex>

#include "shard/probe_pipeline.h"
#include "shard/walk.h"

namespace shoal {

void ShardResidency::locate(const SlotSlices& batch, RowLocations& locations, std::size_t first,
                            std::size_t end) const {
  shard_.find<NoLock>(batch, locations, first, end);
}

void ShardResidency::make_room(std::size_t place, std::size_t more) const {
  const std::unique_lock lock(shard_.tables_[place]->lock);
  table(place).make_room(more);
}

void ShardResidency::insert(std::size_t place, std::uint64_t hash, const std::byte* row) const {
  const std::unique_lock lock(shard_.tables_[place]->lock);
  std::memcpy(table(place).insert(hash), row, shard_.rows_.bytes());
}

void ShardResidency::retain(std::size_t place, std::span<const SlotTable::Entry> rows) const {
  const Slot slot{static_cast<std::uint32_t>(shard_.first_ + place)};
  SlotTable kept(shard_.layout_, slot, shard_.chunks_);
  try {
    kept.reserve(rows.size());
  } catch (...) {
    kept.clear();
    throw;
  }
  for (const SlotTable::Entry& row : rows) {
    std::memcpy(kept.insert(row.hash), row.row, shard_.rows_.bytes());
  }
  const std::unique_lock lock(shard_.tables_[place]->lock);
  table(place).replace_with(kept);
}

}  // namespace shoal
