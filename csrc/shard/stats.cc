// A Shard's statistics and the check of its invariants.

#include <algorithm>
#include <string>

#include "shard/shard.h"

namespace shoal {

std::size_t Shard::bytes_at(std::size_t rows) const {
  const Partition partition{rows, slots_.count()};
  Chunks chunks(rows_.bytes());
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    if (share != 0) {
      bytes += SlotTable(layout_, Slot{static_cast<std::uint32_t>(s)}, chunks).bytes_with(share, false);
    }
  }
  return bytes;
}

std::size_t Shard::saved_bytes_at(std::size_t rows) const {
  const Partition partition{rows, slots_.count()};
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    bytes += share == 0 ? 0 : section_offsets(share).back();
  }
  return bytes;
}

Shard::RowBytes Shard::rows_and_bytes() const {
  RowBytes all{.rows = 0, .bytes = 0};
  for (std::size_t s = 0; s < tables_.size(); ++s) {
    all.rows += tables_[s]->table.size() + rows_elsewhere(s);
    all.bytes += bytes_of(*tables_[s]);
  }
  if (source_ != nullptr) {
    all.bytes = all.rows * (rows_.bytes() + 2 * sizeof(std::uint64_t));
  }
  return all;
}

std::size_t Shard::size() const {
  check_process();
  const Turn turn = this->turn();
  std::size_t rows = 0;
  for (std::size_t s = 0; s < tables_.size(); ++s) {
    const std::shared_lock lock(tables_[s]->lock);
    rows += tables_[s]->table.size() + rows_elsewhere(s);
  }
  return rows;
}

ShardStats Shard::stats() const {
  check_process();
  const Turn turn = this->turn();
  ShardStats stats;
  if (source_ != nullptr) {
    stats.bytes = source_->stats().index_bytes;
    for (std::size_t s = 0; s < tables_.size(); ++s) {
      stats.rows += rows_elsewhere(s);
    }
  }
  for (const auto& slot : tables_) {
    const std::shared_lock lock(slot->lock);
    stats.rows += slot->table.size();
    stats.cells += slot->table.cells();
    stats.bytes += bytes_of(*slot);
    if (slot->filter != nullptr) {
      stats.waiting += slot->filter->waiting();
    }
    const SlotTable::Growth& growth = slot->table.growth();
    stats.growth = {.times = stats.growth.times + growth.times,
                    .memory_ns = stats.growth.memory_ns + growth.memory_ns,
                    .moving_ns = stats.growth.moving_ns + growth.moving_ns,
                    .longest_ns = std::max(stats.growth.longest_ns, growth.longest_ns)};
  }
  stats.pulls = pulls_.load();
  stats.pushes = pushes_.load();
  stats.rows_pulled = rows_pulled_.load();
  stats.rows_pushed = rows_pushed_.load();
  stats.rows_created = rows_created_.load();
  stats.rows_erased = rows_erased_.load();
  stats.nonfinite_rows = nonfinite_rows_.load();
  stats.refused = refused_.load();
  for (std::size_t k = 0; k < stats.expired.size(); ++k) {
    stats.expired[k] = expired_[k].load();
  }
  return stats;
}

std::string Shard::verify() const {
  check_process();
  const Turn turn = this->turn();
  for (std::size_t s = 0; s < tables_.size(); ++s) {
    const std::shared_lock lock(tables_[s]->lock);
    const int broken = tables_[s]->table.verify();
    if (broken != 0) {
      return "slot " + std::to_string(first_ + s) + " breaks invariant I" + std::to_string(broken);
    }
  }
  return source_ == nullptr ? std::string() : source_->verify();
}

}  // namespace shoal
