#include "tier/tiered_shard.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "optim/user_rule.h"
#include "tier/read_rows.h"
#include "tier/storage_error.h"

namespace shoal {

namespace {

constexpr std::size_t kMinKeysPerThread = 1024;  // below it, waking another thread costs more than it saves
constexpr std::size_t kHeatPerRow = 2;           // counters for each row that fits in memory
constexpr std::uint8_t kHot = 3;                 // a pull and a push, and once more

std::unique_ptr<Shard> checked(std::unique_ptr<Shard> shard, std::size_t memory) {
  const std::size_t least = TieredShard::kMinSlotBytes * shard->slots().count();
  SHOAL_CHECK(memory >= least, "a tiered table needs at least " + std::to_string(least) +
                                   " bytes of memory for " + std::to_string(shard->slots().count()) +
                                   " slots, got " + std::to_string(memory) +
                                   ": raise it, or make the store with fewer slots");
  SHOAL_CHECK(
      std::ranges::find(shard->spec().lifecycle.expire(), Expiry::Kind::kMaxRows, &Expiry::kind) ==
          shard->spec().lifecycle.expire().end(),
      "a tiered table has no MaxRows rule, which ranks all rows of a slot at each push: sweep it with "
      "TimeToLive, DecayedScore or MinNorm");
  return shard;
}

SlotSlices slices(const KeyBatch& batch) { return {batch.hashes(), batch.offsets()}; }

}  // namespace

TieredShard::TieredShard(std::unique_ptr<Shard> shard, const std::string& directory, std::size_t memory,
                         ReadQueue::Engine engine)
    : shard_(checked(std::move(shard), memory)),
      residency_(*shard_),
      shape_(shard_->rows().bytes()),
      file_(directory, shape_.page_bytes, engine),
      memory_(memory),
      ahead_(file_, shape_, shard_->slots(), memory / 8) {
  const std::size_t count = shard_->slots().count();
  const std::size_t share =
      memory / count / (shape_.row_bytes + 2 * sizeof(std::uint64_t));  // rows of a slot
  hot_rows_ = share / 2;
  slots_.reserve(count);
  for (std::size_t s = 0; s < count; ++s) {
    slots_.emplace_back(shard_->slots().bits(), share);
    note(s);
  }
}

TieredShard::~TieredShard() = default;

std::unique_lock<std::mutex> TieredShard::enter() {
  residency_.check_process();
  SHOAL_CHECK(!is_stepping(), "the step of an optimizer, or a function of rows, may not use a tiered table");
  const std::lock_guard turn(turn_);  // who waits is next: a loop of pushes does not starve a save
  return std::unique_lock(mutex_);
}

std::size_t TieredShard::logical_rows(std::size_t place) const noexcept {
  const TieredSlot& slot = slots_[place];
  return residency_.rows(place) + (slot.run == nullptr ? 0 : slot.run->rows()) - slot.covered;
}

std::size_t TieredShard::index_bytes(const TieredSlot& slot) const noexcept {
  return sizeof(TieredSlot) + slot.heat.bytes() + (slot.run == nullptr ? 0 : slot.run->bytes()) +
         slot.erased.capacity() * sizeof(std::uint64_t);
}

void TieredShard::note(std::size_t place) noexcept {
  const std::size_t now = residency_.bytes(place) + index_bytes(slots_[place]);
  memory_used_ += now - std::exchange(slots_[place].noted, now);
}

// --- rows of a batch --------------------------------------------------------------------------------------------

TieredShard::Found TieredShard::look_up(const SlotSlices& batch, RowLocations& locations, std::size_t first,
                                        std::size_t end, Use use, std::span<std::size_t> needed) {
  Found found;
  residency_.locate(batch, locations, first, end);
  const bool counts_uses = memory_used_ > memory_ / 4 * 3;  // before that no row is about to be evicted
  for (std::size_t s = first; s < end; ++s) {
    if (batch.offsets[s] == batch.offsets[s + 1]) {
      continue;
    }
    TieredSlot& slot = slots_[s];
    const auto rows = locations.rows(batch.offsets[s], batch.offsets[s + 1] - batch.offsets[s]);
    const std::uint64_t* const hashes = batch.hashes.data() + batch.offsets[s];
    std::size_t missing = 0;
    const std::size_t missed = found.misses.size();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (rows[r] != nullptr) {
        if (counts_uses && use != Use::kPrefetches) {
          slot.heat.add(hashes[r], use == Use::kReads ? 2 : 1);
        }
        continue;
      }
      ++missing;
      if (slot.run != nullptr && slot.run->may_have(hashes[r]) &&
          !std::ranges::binary_search(slot.erased, hashes[r])) {
        found.misses.push_back(hashes[r]);
      }
    }
    const std::size_t misses = found.misses.size() - missed;
    found.hits += rows.size() - missing;
    found.absent += missing - misses;
    needed[s] = use == Use::kCreates ? missing : misses;
  }
  return found;
}

std::vector<TieredShard::Found> TieredShard::look_up(const SlotSlices& batch, RowLocations& locations,
                                                     Use use, std::span<std::size_t> needed) {
  residency_.prepare(batch, locations);
  const Partition partition{batch.hashes.size(),
                            parts_for(batch.hashes.size(), kMinKeysPerThread, shard_->pool().threads())};
  const auto first_slot = [&](std::size_t part) {  // the first slot that starts in the part or after it
    return part == partition.parts
               ? places()
               : static_cast<std::size_t>(
                     std::lower_bound(batch.offsets.begin(), batch.offsets.end() - 1, partition.begin(part)) -
                     batch.offsets.begin());
  };
  std::vector<Found> found(partition.parts);
  shard_->pool().run(partition.parts, [&](std::size_t part) {
    found[part] =
        look_up(batch, locations, part == 0 ? 0 : first_slot(part), first_slot(part + 1), use, needed);
  });
  return found;
}

void TieredShard::bring(const SlotSlices& batch, RowLocations& locations, Use use) {
  std::vector<std::size_t> needed(places());
  std::vector<Found> found = look_up(batch, locations, use, needed);
  make_room(batch, needed);
  for (Found& one : found) {  // a run may be gone now, whose rows were all erased
    std::erase_if(one.misses, [&](std::uint64_t hash) { return slots_[place_of(hash)].run == nullptr; });
  }
  shard_->pool().run(found.size(), [&](std::size_t part) { read_missing(found[part].misses); });
  for (const Found& one : found) {
    counted_.hits += one.hits;
    counted_.absent += one.absent;
  }
}

void TieredShard::read_missing(std::span<const std::uint64_t> misses) {
  if (misses.empty()) {
    return;
  }
  for (std::size_t first = 0; first < misses.size();) {
    const std::size_t place = place_of(misses[first]);
    std::size_t end = first + 1;
    while (end < misses.size() && place_of(misses[end]) == place) {
      ++end;
    }
    residency_.make_room(place, end - first);
    first = end;
  }
  std::size_t found = 0;
  const auto use = [&](std::uint64_t hash, const std::byte* row) {
    if (row != nullptr) {
      const std::size_t place = place_of(hash);
      residency_.insert(place, hash, row);
      ++slots_[place].covered;
      ++found;
    }
  };
  const ReadAhead::Taken taken = ahead_.take(misses);
  for (const auto& [hash, row] : taken.rows) {
    use(hash, row);
  }
  prefetched_.fetch_add(found, std::memory_order_relaxed);
  if (!taken.left.empty()) {
    RowReads reads(file_);
    const auto run_of = [&](std::size_t i) -> const Run& { return *slots_[place_of(taken.left[i])].run; };
    const auto use_read = [&](std::size_t i, const std::byte* row) { use(taken.left[i], row); };
    for (std::size_t next = 0; next < taken.left.size();) {
      next = reads.read(taken.left, next, run_of, use_read);
    }
    reads_.fetch_add(reads.pages_read(), std::memory_order_relaxed);
  }
  found_.fetch_add(found, std::memory_order_relaxed);
  absent_reads_.fetch_add(misses.size() - found, std::memory_order_relaxed);
}

void TieredShard::prefetch(const SlotSlices& batch, RowLocations* locations) {
  const auto lock = enter();
  residency_.check(batch);
  const bool is_on_disk =
      std::ranges::any_of(slots_, [](const TieredSlot& slot) { return slot.run != nullptr; });
  if (!is_on_disk && locations == nullptr) {
    return;
  }
  RowLocations own(batch.hashes);
  std::vector<std::size_t> needed(places());
  std::vector<std::uint64_t> misses;
  for (const Found& one : look_up(batch, locations != nullptr ? *locations : own, Use::kPrefetches, needed)) {
    misses.insert(misses.end(), one.misses.begin(), one.misses.end());
  }
  ahead_.request(misses, [&](std::size_t place) -> const Run& { return *slots_[place].run; });
}

template <class Op>
auto TieredShard::with_rows(const SlotSlices& batch, RowLocations* locations, Use use, const Op& op) {
  if (use != Use::kReads) {
    residency_.wait_for_save(batch.hashes.size());  // while slots can be taken
  }
  const auto lock = enter();
  residency_.check(batch);
  RowLocations own(batch.hashes);
  RowLocations& known = locations != nullptr ? *locations : own;
  const auto count = [&] {
    for (std::size_t s = 0; s < places(); ++s) {
      if (batch.offsets[s] != batch.offsets[s + 1]) {
        slots_[s].changed |= use >= Use::kChanges;
        note(s);
      }
    }
  };
  try {
    bring(batch, known, use);
    ahead_.trim();
    counted_.rows_changed += use != Use::kReads ? batch.hashes.size() : 0;
    if constexpr (std::is_void_v<decltype(op(known))>) {
      op(known);
      count();
    } else {
      auto result = op(known);
      count();
      return result;
    }
  } catch (...) {
    count();
    throw;
  }
}

void TieredShard::pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations) {
  with_rows(batch, locations, Use::kReads,
            [&](RowLocations& known) { shard_->pull(batch, weights, &known); });
}

void TieredShard::pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations) {
  with_rows(slices(batch), locations, Use::kReads,
            [&](RowLocations& known) { shard_->pull_per_key(batch, weights, &known); });
}

std::uint64_t TieredShard::push(const SlotSlices& batch, std::span<const float> grads,
                                const OccurrenceCounts& occurrences, RowLocations* locations) {
  return with_rows(batch, locations, Use::kCreates, [&](RowLocations& known) {
    return shard_->push(batch, grads, occurrences, nullptr, &known);
  });
}

std::uint64_t TieredShard::push_per_key(const KeyBatch& batch, std::span<const float> grads,
                                        const OccurrenceCounts& occurrences, RowLocations* locations) {
  return with_rows(slices(batch), locations, Use::kCreates, [&](RowLocations& known) {
    return shard_->push_per_key(batch, grads, occurrences, &known);
  });
}

void TieredShard::assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock) {
  with_rows(batch, nullptr, Use::kCreates, [&](RowLocations&) { shard_->assign(batch, weights, clock); });
}

std::size_t TieredShard::erase(const SlotSlices& batch) {
  return with_rows(batch, nullptr, Use::kChanges, [&](RowLocations&) {
    // Before the rows are gone: memory may run out. A hash of a row that remains is not looked up here.
    for (std::size_t s = 0; s < places(); ++s) {
      std::vector<std::uint64_t>& erased = slots_[s].erased;
      const auto old = static_cast<std::ptrdiff_t>(erased.size());
      for (std::size_t i = batch.offsets[s]; i < batch.offsets[s + 1] && slots_[s].run != nullptr; ++i) {
        if (slots_[s].run->may_have(batch.hashes[i]) && residency_.has(s, batch.hashes[i])) {
          erased.push_back(batch.hashes[i]);
        }
      }
      std::inplace_merge(erased.begin(), erased.begin() + old, erased.end());
      erased.erase(std::unique(erased.begin(), erased.end()), erased.end());
    }
    return shard_->erase(batch);
  });
}

void TieredShard::contains(const SlotSlices& batch, std::span<std::uint8_t> there) {
  with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { shard_->contains(batch, there); });
}

void TieredShard::state(const SlotSlices& batch, std::size_t column, std::span<float> values) {
  with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { shard_->state(batch, column, values); });
}

void TieredShard::metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) {
  with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { shard_->metadata(batch, k, values); });
}

void TieredShard::locate(const SlotSlices& batch, RowLocations& locations) {
  const auto lock = enter();
  shard_->locate(batch, locations);
}

std::size_t TieredShard::restore(std::size_t rows, std::span<const std::byte> section) {
  const auto hashes = residency_.hashes_of(rows, section);
  residency_.wait_for_save(rows);
  std::size_t restored = 0;
  // Some slots at a time: a section may be of more slots than fit in memory.
  const std::size_t most =
      std::max<std::size_t>(1, memory_ / 4 / (shape_.row_bytes + 2 * sizeof(std::uint64_t)));
  for (std::size_t first = 0; first < hashes.size();) {
    const std::size_t first_place = place_of(hashes[first]);
    std::size_t end = first;
    std::size_t end_place = first_place;
    do {
      end_place = place_of(hashes[end]) + 1;
      end = static_cast<std::size_t>(
          std::partition_point(hashes.begin() + static_cast<std::ptrdiff_t>(end), hashes.end(),
                               [&](std::uint64_t hash) { return place_of(hash) < end_place; }) -
          hashes.begin());
    } while (end < hashes.size() && end - first < most);
    const auto some = std::span(hashes).subspan(first, end - first);
    std::vector<std::uint64_t> offsets(places() + 1);
    for (std::size_t s = 0; s <= places(); ++s) {
      offsets[s] = static_cast<std::uint64_t>(
          std::ranges::partition_point(some, [&](std::uint64_t hash) { return place_of(hash) < s; }) -
          some.begin());
    }
    restored += with_rows({some, offsets}, nullptr, Use::kCreates, [&](RowLocations&) {
      return shard_->restore(rows, section, first_place, end_place);
    });
    first = end;
  }
  return restored;
}

// --- memory -----------------------------------------------------------------------------------------------------

void TieredShard::make_room(const SlotSlices& batch, std::span<const std::size_t> needed) {
  const auto fits = [&] {
    std::size_t more = 0;
    for (std::size_t s = 0; s < places(); ++s) {
      if (needed[s] != 0) {
        more += residency_.bytes_with(s, needed[s]) - residency_.bytes(s);
      }
    }
    return memory_used_ + more <= memory_;
  };
  const std::size_t together = std::min(places(), 2 * shard_->pool().threads());
  for (std::size_t passed = 0; !fits(); passed += together) {
    if (passed >= 2 * places()) {
      std::size_t keys = 0;
      for (std::size_t s = 0; s < places(); ++s) {
        keys += batch.offsets[s + 1] - batch.offsets[s];
      }
      throw MemoryBudgetExceededError(
          "a batch of " + std::to_string(keys) + " different keys does not fit in the " +
          std::to_string(memory_) +
          " bytes of memory that this tiered table may use, of which its index takes " +
          std::to_string(tier_index_bytes()) + ": use smaller batches, or give it more memory");
    }
    std::vector<std::size_t> some(together);
    for (std::size_t& place : some) {
      place = std::exchange(hand_, (hand_ + 1) % places());
    }
    const auto count = [&] {
      for (const std::size_t place : some) {
        note(place);
      }
    };
    try {
      shard_->pool().run(together, [&](std::size_t i) {
        const std::size_t first = batch.offsets[some[i]];
        trim(some[i], batch.hashes.subspan(first, batch.offsets[some[i] + 1] - first), passed < places());
      });
    } catch (...) {
      count();
      throw;
    }
    count();
  }
}

std::vector<bool> TieredShard::chosen(const TieredSlot& slot, std::span<const SlotTable::Entry> entries,
                                      std::span<const std::uint64_t> spared, bool keeps_hot) const {
  unsigned hot = Heat::kMost + 1;
  if (keeps_hot) {
    std::array<std::size_t, Heat::kMost + 1> rows{};
    for (const SlotTable::Entry& entry : entries) {
      ++rows[slot.heat.of(entry.hash)];
    }
    for (std::size_t kept = 0; hot > Heat::kHot && kept + rows[hot - 1] <= hot_rows_; --hot) {
      kept += rows[hot - 1];
    }
  }
  std::vector<bool> keep(entries.size());
  std::size_t next = 0;  // of the spared
  for (std::size_t i = 0; i < entries.size(); ++i) {
    while (next < spared.size() && spared[next] < entries[i].hash) {
      ++next;
    }
    keep[i] =
        slot.heat.of(entries[i].hash) >= hot || (next < spared.size() && spared[next] == entries[i].hash);
  }
  return keep;
}

void TieredShard::trim(std::size_t place, std::span<const std::uint64_t> spared, bool keeps_hot) {
  TieredSlot& slot = slots_[place];
  const std::vector<SlotTable::Entry> entries = residency_.entries(place);
  const std::vector<bool> keep = chosen(slot, entries, spared, keeps_hot);
  const auto dropped = static_cast<std::size_t>(std::ranges::count(keep, false));
  slot.heat.halve();
  // On its first way around the hand leaves slots where a merge would free little.
  if (dropped == 0 || (keeps_hot && slot.changed && dropped < entries.size() / 4)) {
    return;
  }
  std::vector<SlotTable::Entry> kept;
  kept.reserve(entries.size() - dropped);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (keep[i]) {
      kept.push_back(entries[i]);
    }
  }
  if (slot.changed) {
    write_run(place, entries);
  }
  residency_.retain(place, kept);
  slot.covered = kept.size();
}

void TieredShard::write_run(std::size_t place, std::span<const SlotTable::Entry> entries) {
  TieredSlot& slot = slots_[place];
  const std::size_t rows = logical_rows(place);
  std::unique_ptr<Run> merged;
  if (rows != 0) {
    RunWriter to(file_, shape_, shard_->slots(), Slot{static_cast<std::uint32_t>(place)}, rows);
    std::size_t next = 0;
    const auto add_below = [&](std::uint64_t hash) {
      for (; next < entries.size() && entries[next].hash < hash; ++next) {
        to.add(entries[next].hash, entries[next].row);
      }
    };
    if (slot.run != nullptr) {
      auto erased = slot.erased.begin();
      for (RunReader from(*slot.run); !from.at_end(); from.next()) {
        add_below(from.hash());
        while (erased != slot.erased.end() && *erased < from.hash()) {
          ++erased;
        }
        const bool is_covered = (next < entries.size() && entries[next].hash == from.hash()) ||
                                (erased != slot.erased.end() && *erased == from.hash());
        if (!is_covered) {
          to.add(from.hash(), from.row());
        }
      }
      merged_read_.fetch_add(slot.run->file_bytes(), std::memory_order_relaxed);
    }
    for (; next < entries.size(); ++next) {
      to.add(entries[next].hash, entries[next].row);
    }
    merged = to.finish();
    SHOAL_DCHECK(merged->rows() == rows);
    written_.fetch_add(merged->file_bytes(), std::memory_order_relaxed);
    merges_.fetch_add(1, std::memory_order_relaxed);
  }
  ahead_.merged(place, std::exchange(slot.run, std::move(merged)), entries, slot.erased);
  slot.covered = entries.size();
  slot.erased = {};
  slot.changed = false;
}

}  // namespace shoal
