#include "shard/residency.h"

#include <cstring>
#include <mutex>

#include "shard/probe_pipeline.h"
#include "shard/walk.h"

namespace shoal {

void ShardResidency::locate(const SlotSlices& batch, RowLocations& locations, std::size_t first,
                            std::size_t end) const {
  core_.find<NoLock>(batch, locations, first, end);
}

void ShardResidency::make_room(std::size_t place, std::size_t more) const {
  const std::unique_lock lock(core_.states[place]->lock);
  table(place).make_room(more);
}

void ShardResidency::insert(std::size_t place, std::uint64_t hash, const std::byte* row) const {
  const std::unique_lock lock(core_.states[place]->lock);
  std::memcpy(table(place).insert(hash), row, core_.rows.bytes());
}

void ShardResidency::retain(std::size_t place, std::span<const SlotTable::Entry> rows) const {
  const Slot slot{static_cast<std::uint32_t>(core_.first + place)};
  SlotTable retained(core_.layout, slot, core_.chunks);
  try {
    retained.reserve(rows.size());
  } catch (...) {
    retained.clear();
    throw;
  }
  for (const SlotTable::Entry& row : rows) {
    std::memcpy(retained.insert(row.hash), row.row, core_.rows.bytes());
  }
  const std::unique_lock lock(core_.states[place]->lock);
  table(place).replace_with(retained);
}

}  // namespace shoal
