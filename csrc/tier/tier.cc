//   bring    finds the batch's rows in memory; those absent there, and present by their run's filter, are
//            read, each with one read of a page, many at a time
//   evict    before that, if memory would not suffice: the slots are visited in rotation (CLOCK). A slot
//            keeps the rows that are used often and drops the others; if some row of the slot has changed,
//            all its rows in memory are first merged with its run into a new one that replaces the old in one
//            assignment. Slots fill up until the rotation returns, so a merge of a whole run is shared by
//            many changed rows
//   ahead    rows of calls to come are read meanwhile, where they are known (tier/read_ahead.h)
//   clean    a thread evicts between calls, slot by slot, so that the next call finds as much memory free as
//            the last ones needed. It spares the rows of the last calls, and gives way to a call that waits:
//            this waits for the merge of one slot at most
//   uses     counters that say which rows were used again (tier/use_counters.h), halved when the rotation
//            passes
//   whole    functions of all rows bring in one slot at a time, all of it, and then drop what they have
//            brought
//
// Memory: rows, index, filters, fences and use counters are at most `memory` bytes; besides, working memory
// of 8 MiB a thread, since a merge reads one run and writes another; an eighth of `memory` for rows that are
// read ahead, one slot during a function of all rows, and what a save must keep.

#include "tier/tier.h"

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

std::size_t checked(std::size_t memory, const Shard& shard) {
  const std::size_t slots = shard.slots().count();
  const std::size_t least = Tier::kMinSlotBytes * slots;
  SHOAL_CHECK(memory >= least, "a tiered table needs at least " + std::to_string(least) +
                                   " bytes of memory for " + std::to_string(slots) + " slots, got " +
                                   std::to_string(memory) + ": raise it, or make the store with fewer slots");
  SHOAL_CHECK(
      Tier::suits(shard.spec()),
      "a tiered table has no MaxRows rule, which ranks all rows of a slot at each push: sweep it with "
      "TimeToLive, DecayedScore or MinNorm");
  return memory;
}

}  // namespace

bool Tier::suits(const TableSpec& spec) noexcept {
  return std::ranges::find(spec.lifecycle.expire(), Expiry::Kind::kMaxRows, &Expiry::kind) ==
         spec.lifecycle.expire().end();
}

Tier::Tier(Shard& shard, const std::string& directory, std::size_t memory, ReadQueue::Engine engine)
    : Tier(shard, directory, checked(memory, shard), nullptr, engine) {}

Tier::Tier(Shard& shard, const std::string& directory, TierMemory& memory)
    : Tier(shard, directory, memory.bytes(), &memory, ReadQueue::Engine::kBest) {}

Tier::Tier(Shard& shard, const std::string& directory, std::size_t memory, TierMemory* shared,
           ReadQueue::Engine engine)
    : shard_(shard),
      residency_(shard),
      shape_(shard.rows().bytes()),
      file_(directory, shape_.page_bytes, engine),
      memory_(memory),
      ahead_(file_, shape_, shard.slots(), shard.first_slot(), memory / 8) {
  const std::size_t count = shard.end_slot() - shard.first_slot();
  if (shared != nullptr) {
    shared_.emplace(*shared, count * row_share());
  }
  counted_rows_ = this->memory() / count / row_share();
  slots_.reserve(count);
  for (std::size_t s = 0; s < count; ++s) {
    slots_.emplace_back(shard.slots().bits(), counted_rows_);
    note(s);
  }
}

Tier::~Tier() {
  if (cleaner_ == nullptr) {
    return;
  }
  if (!cleaner_->is_of_this_process()) {
    static_cast<void>(signal_.release());
    return;
  }
  {
    const MutexLock lock(signal_->mutex);
    signal_->stops = true;
  }
  signal_->wake.notify_one();
  ++callers_;  // it gives way
  cleaner_->join();
}

std::size_t Tier::memory() const noexcept {
  const std::size_t count = shard_.end_slot() - shard_.first_slot();
  return shared_ ? std::max(shared_->bytes(), kMinSlotBytes * count) : memory_;
}

void Tier::lock() {
  SHOAL_CHECK(!is_stepping(), "the step of an optimizer, or a function of rows, may not use a tiered table");
  struct Waiting {
    std::atomic<std::size_t>& callers;
    explicit Waiting(std::atomic<std::size_t>& count) : callers(count) { ++callers; }
    ~Waiting() { --callers; }
  };
  const Waiting waits(callers_);
  const MutexLock turn(turn_);  // who waits is next: a loop of pushes does not starve a save
  mutex_.lock();
}

// Also after a call that has failed: what it had brought, created or erased until then is counted.
void Tier::unlock() noexcept {
  if (brought_) {
    for (std::size_t s = 0; s < places(); ++s) {
      if (brought_->batch.offsets[s] != brought_->batch.offsets[s + 1]) {
        slots_[s].changed |= brought_->use >= Use::kErases;
        note(s);
      }
    }
    brought_.reset();
    locations_.reset();
    wake_cleaner();
  }
  mutex_.unlock();
}

std::size_t Tier::rows_elsewhere(std::size_t place) const noexcept {
  const SlotTier& slot = slots_[place];
  return slot.run == nullptr ? 0 : slot.run->rows() - slot.covered;
}

std::size_t Tier::rows_of(std::size_t place) const noexcept {
  return residency_.rows(place) + rows_elsewhere(place);
}

std::size_t Tier::index_bytes(const SlotTier& slot) const noexcept {
  return sizeof(SlotTier) + slot.uses.bytes() + (slot.run == nullptr ? 0 : slot.run->bytes()) +
         slot.erased.capacity() * sizeof(std::uint64_t);
}

void Tier::note(std::size_t place) noexcept {
  const std::size_t now = residency_.bytes(place) + index_bytes(slots_[place]);
  memory_used_ += now - std::exchange(slots_[place].noted, now);
}

// --- rows of a batch ---------------------------------------------------------------------------------------

Tier::Found Tier::look_up(const SlotSlices& batch, RowLocations& locations, std::size_t first,
                          std::size_t end, Use use, std::span<std::size_t> needed) {
  Found found;
  residency_.locate(batch, locations, first, end);
  const bool counts_uses = memory_used_ > memory() / 4 * 3;  // before that no row is about to be evicted
  for (std::size_t s = first; s < end; ++s) {
    if (batch.offsets[s] == batch.offsets[s + 1]) {
      continue;
    }
    SlotTier& slot = slots_[s];
    const auto rows = locations.rows(batch.offsets[s], batch.offsets[s + 1] - batch.offsets[s]);
    const std::uint64_t* const hashes = batch.hashes.data() + batch.offsets[s];
    std::size_t missing = 0;
    const std::size_t missed = found.misses.size();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if (rows[r] != nullptr) {
        if (counts_uses && use != Use::kPrefetches) {
          slot.uses.add(hashes[r], use == Use::kReads ? 2 : 1);
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

std::vector<Tier::Found> Tier::look_up(const SlotSlices& batch, RowLocations& locations, Use use,
                                       std::span<std::size_t> needed) {
  residency_.prepare(batch, locations);
  const Partition partition{batch.hashes.size(),
                            parts_for(batch.hashes.size(), kMinKeysPerThread, shard_.pool().threads())};
  const auto first_slot = [&](std::size_t part) {  // the first slot that starts in the part or after it
    return part == partition.parts
               ? places()
               : static_cast<std::size_t>(
                     std::lower_bound(batch.offsets.begin(), batch.offsets.end() - 1, partition.begin(part)) -
                     batch.offsets.begin());
  };
  std::vector<Found> found(partition.parts);
  shard_.pool().run(partition.parts, [&](std::size_t part) {
    found[part] =
        look_up(batch, locations, part == 0 ? 0 : first_slot(part), first_slot(part + 1), use, needed);
  });
  return found;
}

RowLocations& Tier::bring(const SlotSlices& batch, RowLocations* locations, Use use) {
  brought_ = {.batch = batch, .use = use};
  RowLocations& known = locations != nullptr ? *locations : locations_.emplace(batch.hashes);
  std::vector<std::size_t> needed(places());
  std::vector<Found> found = look_up(batch, known, use, needed);
  make_room(batch, needed);
  for (Found& of_part : found) {  // a run may be gone now, whose rows were all erased
    std::erase_if(of_part.misses, [&](std::uint64_t hash) { return slots_[place_of(hash)].run == nullptr; });
  }
  shard_.pool().run(found.size(), [&](std::size_t part) { read_missing(found[part].misses); });
  for (const Found& of_part : found) {
    counted_.hits += of_part.hits;
    counted_.absent += of_part.absent;
  }
  ahead_.trim();
  remember(batch);
  counted_.rows_changed += use != Use::kReads ? batch.hashes.size() : 0;
  if (use == Use::kErases) {
    before_erase(batch);
  }
  return known;
}

void Tier::read_missing(std::span<const std::uint64_t> misses) {
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

void Tier::prefetch(const SlotSlices& batch, RowLocations* locations) {
  const bool is_on_disk =
      std::ranges::any_of(slots_, [](const SlotTier& slot) { return slot.run != nullptr; });
  if (!is_on_disk && locations == nullptr) {
    return;
  }
  RowLocations own(batch.hashes);
  std::vector<std::size_t> needed(places());
  std::vector<std::uint64_t> misses;
  for (const Found& of_part :
       look_up(batch, locations != nullptr ? *locations : own, Use::kPrefetches, needed)) {
    misses.insert(misses.end(), of_part.misses.begin(), of_part.misses.end());
  }
  ahead_.request(misses, [&](std::size_t place) -> const Run& { return *slots_[place].run; });
}

// --- between calls -----------------------------------------------------------------------------------------

void Tier::wake_cleaner() noexcept {
  if (cleaner_ == nullptr || memory_used_ + needed_ <= memory()) {
    return;
  }
  {
    const MutexLock lock(signal_->mutex);
    signal_->is_due = true;
  }
  signal_->wake.notify_one();
}

void Tier::remember(const SlotSlices& batch) {
  if (cleaner_ != nullptr) {
    last_[next_last_].assign(batch.hashes.begin(), batch.hashes.end());
    next_last_ = (next_last_ + 1) % kRemembered;
  }
}

std::vector<std::uint64_t> Tier::remembered(std::size_t place) const {
  const std::uint64_t first = shard_.slots().first_hash(slot_of(place));
  std::vector<std::uint64_t> hashes;
  for (const std::vector<std::uint64_t>& last : last_) {
    for (auto at = std::ranges::lower_bound(last, first); at != last.end() && place_of(*at) == place; ++at) {
      hashes.push_back(*at);
    }
  }
  std::ranges::sort(hashes);
  return hashes;
}

void Tier::clean() noexcept {
  for (;;) {
    {
      const MutexLock lock(signal_->mutex);
      while (!signal_->is_due && !signal_->stops) {
        signal_->wake.wait(signal_->mutex);
      }
      if (signal_->stops) {
        return;
      }
      signal_->is_due = false;
    }
    for (std::size_t passed = 0; passed < places(); ++passed) {
      const std::unique_lock lock(mutex_);
      if (callers_.load() != 0 || memory_used_ + needed_ <= memory()) {
        break;
      }
      const std::size_t place = std::exchange(next_place_, (next_place_ + 1) % places());
      const std::uint64_t merges = merges_.load();
      bool failed = false;
      try {
        trim(place, remembered(place), true);
      } catch (const std::exception&) {
        failed = true;  // the call that needs the memory reports it
      }
      note(place);
      background_merges_.fetch_add(merges_.load() - merges, std::memory_order_relaxed);
      if (failed) {
        break;
      }
    }
  }
}

// A hash of a row that remains is not looked up in `erased`.
void Tier::before_erase(const SlotSlices& batch) {
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
}

// --- memory ------------------------------------------------------------------------------------------------

void Tier::make_room(const SlotSlices& batch, std::span<const std::size_t> needed) {
  const std::size_t limit = memory();
  if (const std::size_t rows = limit / places() / row_share();
      rows < counted_rows_ / 2 || rows > 2 * counted_rows_) {
    counted_rows_ = rows;  // the part of a shared memory has changed
    for (std::size_t s = 0; s < places(); ++s) {
      slots_[s].uses = UseCounters(shard_.slots().bits(), rows);
      note(s);
    }
  }
  std::size_t more = 0;
  const auto fits = [&] {
    more = 0;
    for (std::size_t s = 0; s < places(); ++s) {
      if (needed[s] != 0) {
        more += residency_.bytes_with(s, needed[s]) - residency_.bytes(s);
      }
    }
    return memory_used_ + more <= limit;
  };
  const std::size_t together = std::min(places(), 2 * shard_.pool().threads());
  const bool has_room = fits();
  needed_ = std::min(limit / 8, std::max(more, needed_ - needed_ / 16));
  if (!has_room && cleaner_ == nullptr) {
    cleaner_ = std::make_unique<Thread>([this] { clean(); });
  }
  for (std::size_t passed = 0; !fits(); passed += together) {
    if (passed >= 2 * places()) {
      if (shared_) {
        return;
      }
      std::size_t keys = 0;
      for (std::size_t s = 0; s < places(); ++s) {
        keys += batch.offsets[s + 1] - batch.offsets[s];
      }
      throw MemoryBudgetExceededError(
          "a batch of " + std::to_string(keys) + " different keys does not fit in the " +
          std::to_string(limit) +
          " bytes of memory that this tiered table may use, of which its index takes " +
          std::to_string(index_bytes()) + ": use smaller batches, or give it more memory");
    }
    std::vector<std::size_t> evicted_places(together);
    for (std::size_t& place : evicted_places) {
      place = std::exchange(next_place_, (next_place_ + 1) % places());
    }
    const auto count = [&] {
      for (const std::size_t place : evicted_places) {
        note(place);
      }
    };
    try {
      shard_.pool().run(together, [&](std::size_t i) {
        const std::size_t first = batch.offsets[evicted_places[i]];
        trim(evicted_places[i], batch.hashes.subspan(first, batch.offsets[evicted_places[i] + 1] - first),
             passed < places());
      });
    } catch (...) {
      count();
      throw;
    }
    count();
  }
}

std::vector<bool> Tier::chosen(const SlotTier& slot, std::span<const SlotTable::Entry> entries,
                               std::span<const std::uint64_t> spared, bool keeps_used) const {
  unsigned kept_from = UseCounters::kMost + 1;  // uses
  const std::size_t max_rows = counted_rows_ / 2;
  if (keeps_used) {
    std::array<std::size_t, UseCounters::kMost + 1> rows{};
    for (const SlotTable::Entry& entry : entries) {
      ++rows[slot.uses.of(entry.hash)];
    }
    for (std::size_t kept = 0; kept_from > UseCounters::kManyUses && kept + rows[kept_from - 1] <= max_rows;
         --kept_from) {
      kept += rows[kept_from - 1];
    }
  }
  std::vector<bool> stays(entries.size());
  std::size_t next = 0;  // of the spared
  for (std::size_t i = 0; i < entries.size(); ++i) {
    while (next < spared.size() && spared[next] < entries[i].hash) {
      ++next;
    }
    stays[i] = slot.uses.of(entries[i].hash) >= kept_from ||
               (next < spared.size() && spared[next] == entries[i].hash);
  }
  return stays;
}

void Tier::trim(std::size_t place, std::span<const std::uint64_t> spared, bool keeps_used) {
  SlotTier& slot = slots_[place];
  const std::vector<SlotTable::Entry> entries = residency_.entries(place);
  const std::vector<bool> stays = chosen(slot, entries, spared, keeps_used);
  const auto dropped = static_cast<std::size_t>(std::ranges::count(stays, false));
  slot.uses.halve();
  // The first rotation passes over slots where a merge would free little.
  if (dropped == 0 || (keeps_used && slot.changed && dropped < entries.size() / 4)) {
    return;
  }
  std::vector<SlotTable::Entry> kept;
  kept.reserve(entries.size() - dropped);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (stays[i]) {
      kept.push_back(entries[i]);
    }
  }
  if (slot.changed) {
    write_run(place, entries);
  }
  residency_.retain(place, kept);
  slot.covered = kept.size();
}

void Tier::write_run(std::size_t place, std::span<const SlotTable::Entry> entries) {
  SlotTier& slot = slots_[place];
  const std::size_t rows = rows_of(place);
  std::unique_ptr<Run> merged;
  if (rows != 0) {
    RunWriter to(file_, shape_, shard_.slots(), slot_of(place), rows);
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
