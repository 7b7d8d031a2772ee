// Functions of all rows of a tiered table, slot by slot; what there is; snapshots.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "shard/user_function.h"
#include "tier/tiered_shard.h"

namespace shoal {

// --- whole slots ------------------------------------------------------------------------------------------------

void TieredShard::load_slot(std::size_t place) {
  TieredSlot& slot = slots_[place];
  if (slot.run == nullptr || slot.covered == slot.run->rows()) {
    return;
  }
  residency_.make_room(place, slot.run->rows() - slot.covered);
  for (RunReader from(*slot.run); !from.at_end(); from.next()) {
    if (!residency_.has(place, from.hash()) && !std::ranges::binary_search(slot.erased, from.hash())) {
      residency_.insert(place, from.hash(), from.row());
      ++slot.covered;
    }
  }
  merged_read_.fetch_add(slot.run->file_bytes(), std::memory_order_relaxed);
}

// Calls op() with all rows of a slot in memory, and then drops those that were brought in, if there is no room for them.
template <class Op>
auto TieredShard::with_slot(std::size_t place, bool changes, const Op& op) {
  TieredSlot& slot = slots_[place];
  std::vector<std::uint64_t> before;
  for (const SlotTable::Entry& entry : residency_.entries(place)) {
    before.push_back(entry.hash);
  }
  const auto settle = [&] {
    note(place);
    if (memory_used_ <= memory_ || (!changes && residency_.rows(place) == before.size())) {
      return;
    }
    const auto entries = residency_.entries(place);
    if (slot.changed && changes) {
      write_run(place, entries);
    }
    std::vector<SlotTable::Entry> kept;
    auto was = before.begin();
    for (const SlotTable::Entry& entry : entries) {
      while (was != before.end() && *was < entry.hash) {
        ++was;
      }
      if (was != before.end() && *was == entry.hash) {
        kept.push_back(entry);
      }
    }
    residency_.retain(place, kept);
    slot.covered -= entries.size() - kept.size();
    note(place);
  };
  try {
    load_slot(place);
    if (changes) {
      // All its rows are in memory: the run is of no more use, and rows may be erased.
      ahead_.forget(place, std::move(slot.run));
      slot.covered = 0;
      slot.erased = {};
      slot.changed = true;
    }
    if constexpr (std::is_void_v<decltype(op())>) {
      op();
      settle();
    } else {
      auto result = op();
      settle();
      return result;
    }
  } catch (...) {
    note(place);
    throw;
  }
}

std::size_t TieredShard::section(Slot slot, std::vector<std::byte>& bytes) {
  const auto lock = enter();
  return with_slot(index_of(slot), false, [&] { return shard_->section(slot, bytes); });
}

void TieredShard::read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) {
  const auto lock = enter();
  with_slot(index_of(slot), false, [&] { shard_->read_slot(slot, hashes, weights); });
}

std::vector<double> TieredShard::reduce(Function function, std::span<const double> parameters) {
  const bool is_users = function == Function::kMap || function == Function::kApply;
  const auto lock = enter();
  std::vector<std::vector<double>> parts;
  shoal::reduce(*shard_, function, parameters, 0, 0);  // bad parameters change nothing
  for (std::size_t s = 0; s < places(); ++s) {
    if (is_users && logical_rows(s) == 0) {
      continue;
    }
    parts.push_back(with_slot(s, changes(function) && logical_rows(s) != 0,
                              [&] { return shoal::reduce(*shard_, function, parameters, s, s + 1); }));
    if (is_users && user_function_failed(parts.back())) {
      break;
    }
  }
  return join(function, parameters, parts);
}

std::vector<std::uint64_t> TieredShard::sweep(std::uint32_t store_clock, std::span<const Expiry> rules,
                                              bool dry_run) {
  constexpr std::ptrdiff_t kReturns =
      5;  // the words of occurrences, which are those of the table at each call
  const auto lock = enter();
  std::vector<std::uint64_t> total = shard_->sweep(0, 0, store_clock, rules, dry_run);
  const std::vector<std::uint64_t> returns(total.begin() + kReturns,
                                           total.begin() + static_cast<std::ptrdiff_t>(Shard::kSweepHead));
  for (std::size_t s = 0; s < places(); ++s) {
    const auto words =
        with_slot(s, !dry_run, [&] { return shard_->sweep(s, s + 1, store_clock, rules, dry_run); });
    std::transform(words.begin(), words.end(), total.begin(), total.begin(), std::plus<>());
  }
  std::ranges::copy(returns, total.begin() + kReturns);
  return total;
}

void TieredShard::pause_writers() {
  auto lock = enter();
  shard_->pause_writers();
  lock.release();  // until resume_writers()
}

void TieredShard::resume_writers() {
  shard_->resume_writers();
  mutex_.unlock();
}

// --- what there is ----------------------------------------------------------------------------------------------

std::size_t TieredShard::size() {
  const auto lock = enter();
  std::size_t rows = 0;
  for (std::size_t s = 0; s < places(); ++s) {
    rows += logical_rows(s);
  }
  return rows;
}

ShardStats TieredShard::stats() {
  const auto lock = enter();
  ShardStats stats = shard_->stats();
  stats.rows = 0;
  for (std::size_t s = 0; s < places(); ++s) {
    stats.rows += logical_rows(s);
    stats.bytes += index_bytes(slots_[s]);
  }
  return stats;
}

std::size_t TieredShard::tier_index_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const TieredSlot& slot : slots_) {
    bytes += index_bytes(slot);
  }
  return bytes;
}

TierStats TieredShard::tier_stats() {
  const auto lock = enter();
  TierStats stats = counted_;
  for (std::size_t s = 0; s < places(); ++s) {
    stats.rows_in_memory += residency_.rows(s);
    stats.rows_on_disk += slots_[s].run == nullptr ? 0 : slots_[s].run->rows();
  }
  stats.memory_bytes = memory_used_;
  stats.index_bytes = tier_index_bytes();
  stats.disk_bytes = file_.file_bytes();
  stats.misses = found_.load();
  stats.prefetched = prefetched_.load();
  stats.absent_reads = absent_reads_.load();
  stats.absent += stats.absent_reads;
  stats.reads = reads_.load() + ahead_.reads();
  stats.merges = merges_.load();
  stats.merged_bytes_read = merged_read_.load();
  stats.bytes_written = written_.load();
  stats.is_direct = file_.is_direct();
  stats.is_async = file_.is_async();
  return stats;
}

std::size_t TieredShard::ahead_bytes() {
  const auto lock = enter();
  return ahead_.bytes();
}

std::string TieredShard::verify() {
  const auto lock = enter();
  std::string broken = shard_->verify();
  for (std::size_t s = 0; s < places() && broken.empty(); ++s) {
    const TieredSlot& slot = slots_[s];
    std::size_t covered = 0;
    std::size_t unequal = 0;
    std::size_t unequal_ahead = 0;
    const std::size_t rows = residency_.rows(s);
    if (slot.run != nullptr) {
      const auto entries = residency_.entries(s);
      auto entry = entries.begin();
      for (RunReader from(*slot.run); !from.at_end(); from.next()) {
        entry = std::find_if(entry, entries.end(),
                             [&](const SlotTable::Entry& one) { return one.hash >= from.hash(); });
        const bool is_here = entry != entries.end() && entry->hash == from.hash();
        const std::byte* const ahead = ahead_.find(s, from.hash());
        unequal_ahead += ahead != nullptr && std::memcmp(ahead, from.row(), shape_.row_bytes) != 0 ? 1U : 0U;
        covered += is_here || std::ranges::binary_search(slot.erased, from.hash()) ? 1U : 0U;
        unequal += is_here && std::memcmp(entry->row, from.row(), shape_.row_bytes) != 0 ? 1U : 0U;
      }
    }
    if (covered != slot.covered) {
      broken = "slot " + std::to_string(s) + " breaks invariant I3: " + std::to_string(covered) +
               " rows of its run are invalid instead of " + std::to_string(slot.covered);
    } else if (!slot.changed && (unequal != 0 || rows != covered || !slot.erased.empty())) {
      broken = "slot " + std::to_string(s) + " breaks invariant I4";
    } else if (unequal_ahead != 0) {
      broken = "slot " + std::to_string(s) + " breaks invariant I5";
    }
  }
  return broken;
}

// --- snapshots --------------------------------------------------------------------------------------------------

TieredSnapshot::TieredSnapshot(TieredShard& shard, std::uint32_t store_clock, Snapshot::Kind kind,
                               std::size_t most, Purpose purpose)
    : shard_(shard), inner_(*shard.shard_, store_clock, kind, most, purpose) {
  // Writers are paused: the table is locked.
  for (std::size_t s = 0; s < shard.places(); ++s) {
    rows_ += shard.logical_rows(s);
  }
  bytes_ = rows_ * (shard.shape_.row_bytes + 2 * sizeof(std::uint64_t));
}

Snapshot::Piece TieredSnapshot::take(Slot slot) {
  const auto lock = shard_.enter();
  return shard_.with_slot(index_of(slot), false, [&] { return inner_.take(slot); });
}

void TieredSnapshot::read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) {
  const auto lock = shard_.enter();
  shard_.with_slot(index_of(slot), false, [&] { inner_.read_slot(slot, hashes, weights); });
}

Snapshot::Ranges TieredSnapshot::read_changes(Slot slot, std::vector<std::uint64_t>& hashes,
                                              std::vector<float>& weights) {
  const auto lock = shard_.enter();
  return shard_.with_slot(index_of(slot), false, [&] { return inner_.read_changes(slot, hashes, weights); });
}

}  // namespace shoal
