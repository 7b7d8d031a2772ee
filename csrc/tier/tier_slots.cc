// Tier: whole slots, and what there is.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "tier/tier.h"

namespace shoal {

// --- whole slots -------------------------------------------------------------------------------------------

void Tier::with_slot(std::size_t place, bool changes, const std::function<void()>& use) {
  const std::vector<std::uint64_t> before = hashes_in_memory(place);
  try {
    load_slot(place);
    if (changes) {
      begin_changes(place);
    }
    use();
    end_slot(place, changes, before);
  } catch (...) {
    note(place);
    throw;
  }
}

void Tier::load_slot(std::size_t place) {
  SlotTier& slot = slots_[place];
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

std::vector<std::uint64_t> Tier::hashes_in_memory(std::size_t place) const {
  std::vector<std::uint64_t> hashes;
  for (const SlotTable::Entry& entry : residency_.entries(place)) {
    hashes.push_back(entry.hash);
  }
  return hashes;
}

// All rows are in memory: the run is of no more use, and rows may be erased.
void Tier::begin_changes(std::size_t place) noexcept {
  SlotTier& slot = slots_[place];
  ahead_.forget(place, std::move(slot.run));
  slot.covered = 0;
  slot.erased = {};
  slot.changed = true;
}

void Tier::end_slot(std::size_t place, bool changes, std::span<const std::uint64_t> before) {
  SlotTier& slot = slots_[place];
  note(place);
  if (memory_used_ <= memory() || (!changes && residency_.rows(place) == before.size())) {
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
}

// --- what there is -----------------------------------------------------------------------------------------

std::size_t Tier::index_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const SlotTier& slot : slots_) {
    bytes += index_bytes(slot);
  }
  return bytes;
}

TierStats Tier::stats() const {
  TierStats stats = counted_;
  for (std::size_t s = 0; s < places(); ++s) {
    stats.rows_in_memory += residency_.rows(s);
    stats.rows_on_disk += slots_[s].run == nullptr ? 0 : slots_[s].run->rows();
  }
  stats.memory_bytes = memory_used_;
  stats.index_bytes = index_bytes();
  stats.disk_bytes = file_.file_bytes();
  stats.misses = found_.load();
  stats.prefetched = prefetched_.load();
  stats.absent_reads = absent_reads_.load();
  stats.absent += stats.absent_reads;
  stats.reads = reads_.load() + ahead_.reads();
  stats.merges = merges_.load();
  stats.background_merges = background_merges_.load();
  stats.merged_bytes_read = merged_read_.load();
  stats.bytes_written = written_.load();
  stats.is_direct = file_.is_direct();
  stats.is_async = file_.is_async();
  return stats;
}

std::string Tier::verify() {
  std::string broken;
  for (std::size_t s = 0; s < places() && broken.empty(); ++s) {
    const SlotTier& slot = slots_[s];
    std::size_t covered = 0;
    std::size_t unequal = 0;
    std::size_t unequal_ahead = 0;
    const std::size_t rows = residency_.rows(s);
    if (slot.run != nullptr) {
      const auto entries = residency_.entries(s);
      auto entry = entries.begin();
      for (RunReader from(*slot.run); !from.at_end(); from.next()) {
        entry = std::find_if(entry, entries.end(),
                             [&](const SlotTable::Entry& row) { return row.hash >= from.hash(); });
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

}  // namespace shoal
