// A Shard's statistics and the check of its invariants.

#include <algorithm>
#include <string>

#include "shard/shard.h"

namespace shoal {

std::size_t Shard::bytes_at(std::size_t rows) const {
  const Partition partition{rows, core_.slots.count()};
  Chunks chunks(core_.rows.bytes());
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < core_.slots.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    if (share != 0) {
      bytes += SlotTable(core_.layout, Slot{static_cast<std::uint32_t>(s)}, chunks).bytes_with(share, false);
    }
  }
  return bytes;
}

std::size_t Shard::size() const {
  core_.owner.check();
  const ShardCore::Turn turn = core_.turn();
  std::size_t rows = 0;
  for (std::size_t s = 0; s < core_.states.size(); ++s) {
    const std::shared_lock lock(core_.states[s]->lock);
    rows += core_.states[s]->table.size() + core_.rows_elsewhere(s);
  }
  return rows;
}

ShardStats Shard::stats() const {
  core_.owner.check();
  const ShardCore::Turn turn = core_.turn();
  ShardStats stats;
  if (core_.source != nullptr) {
    stats.bytes = core_.source->stats().index_bytes;
    for (std::size_t s = 0; s < core_.states.size(); ++s) {
      stats.rows += core_.rows_elsewhere(s);
    }
  }
  for (const auto& slot : core_.states) {
    const std::shared_lock lock(slot->lock);
    stats.rows += slot->table.size();
    stats.cells += slot->table.cells();
    stats.bytes += slot->bytes();
    if (slot->filter != nullptr) {
      stats.waiting += slot->filter->waiting();
    }
    const SlotTable::Growth& growth = slot->table.growth();
    stats.growth = {.times = stats.growth.times + growth.times,
                    .memory_ns = stats.growth.memory_ns + growth.memory_ns,
                    .moving_ns = stats.growth.moving_ns + growth.moving_ns,
                    .longest_ns = std::max(stats.growth.longest_ns, growth.longest_ns)};
  }
  core_.counters.write_to(stats);
  return stats;
}

std::optional<TierStats> Shard::tier_stats() const {
  const ShardCore::Turn turn = core_.turn();
  return core_.source == nullptr ? std::nullopt : std::optional(core_.source->stats());
}

std::string Shard::verify() const {
  core_.owner.check();
  const ShardCore::Turn turn = core_.turn();
  for (std::size_t s = 0; s < core_.states.size(); ++s) {
    const std::shared_lock lock(core_.states[s]->lock);
    const int broken = core_.states[s]->table.verify();
    if (broken != 0) {
      return "slot " + std::to_string(core_.first + s) + " breaks invariant I" + std::to_string(broken);
    }
  }
  return core_.source == nullptr ? std::string() : core_.source->verify();
}

}  // namespace shoal
