// Tier: the rows of a shard that are not in memory, on disk in one sorted run a slot (tier/run.h). Before a Shard
// processes a batch, the rows of the batch that are on disk are brought into it, exactly as they were
// (tier/tiered_shard.h). tier.cc has what is brought and evicted, docs/decisions/0037 why.
//
// Invariants (verify() checks them)
//   I1  those of the shard
//   I2  a row of a run is valid unless a row of that hash is in memory or in `erased`
//   I3  covered is the number of rows of the run that I2 makes invalid; so a slot has rows in memory + run - covered
//       rows
//   I4  in a slot that has not changed, every row in memory equals that of the run, and erased is empty
//   I5  a row that was read ahead, and was not used, equals that of the run
//
// A failing disk: a call throws TierStorageError or TierCorruptionError before its shard has begun, and no row is
// lost or changed; functions of all rows that change them may have finished some slots.
//
// Threads: any number of callers; calls are processed one at a time, each by all threads of the pool. Locks, in this
// order: turn_, mutex_, then those of the shard.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/threads.h"
#include "shard/residency.h"
#include "shard/shard.h"
#include "shard/tier_stats.h"
#include "tier/heat.h"
#include "tier/page_file.h"
#include "tier/read_ahead.h"
#include "tier/run.h"
#include "tier/tier_memory.h"

namespace shoal {

class Tier {
 public:
  static constexpr std::size_t kMinSlotBytes = 4096;

  // Either memory of its own, in which all rows of a batch must fit; or a part of some that is shared, which a batch exceeds if it
  // has to, so that what is executed does not depend on what is in memory. Throws TierStorageError.
  Tier(Shard& shard, const std::string& directory, std::size_t memory, ReadQueue::Engine engine);
  Tier(Shard& shard, const std::string& directory, TierMemory& memory);
  ~Tier();

  enum class Use : std::uint8_t { kPrefetches, kReads, kChanges, kCreates };

  // The calling thread's turn, and the lock of everything here.
  std::unique_lock<std::mutex> enter();
  void leave() noexcept { mutex_.unlock(); }  // for a lock that was released
  // The same to change all rows of a slot, which may have to wait for a save: before the turn, in which slots cannot be saved.
  std::unique_lock<std::mutex> enter_to_change(std::size_t place);

  // Calls op(locations) with all rows of the batch in memory, in a turn.
  template <class Op>
  auto with_rows(const SlotSlices& batch, RowLocations* locations, Use use, const Op& op);
  // Before rows of a batch are erased, within op.
  void before_erase(const SlotSlices& batch);
  // The same for the hashes of a section, some slots at a time: op(first, end) returns how many rows of the slots it has added.
  template <class Op>
  std::size_t with_section(std::size_t rows, std::span<const std::byte> section, std::size_t first,
                           std::size_t end, const Op& op);
  // Begins to read the rows of a later call that are on disk, and locates the others.
  void prefetch(const SlotSlices& batch, RowLocations* locations);

  // In a turn. Calls op() with all rows of a slot in memory, and then drops those that were brought in, if there is no room for them.
  template <class Op>
  auto with_slot(std::size_t place, bool changes, const Op& op);

  // In a turn.
  std::size_t rows_of(std::size_t place) const noexcept;
  std::size_t rows() const noexcept;
  std::size_t index_bytes() const noexcept;
  TierStats stats() const;
  std::string verify();
  std::size_t ahead_bytes() const noexcept { return ahead_.bytes(); }  // of rows that are read ahead
  const PageFile& file() const noexcept { return file_; }

 private:
  struct SlotTier {
    SlotTier(unsigned slot_bits, std::size_t rows) : heat(slot_bits, rows) {}
    std::unique_ptr<Run> run;
    std::size_t covered = 0;
    std::vector<std::uint64_t> erased;  // ascending; hashes that the run may have
    bool changed = false;
    Heat heat;
    std::size_t noted = 0;  // bytes, as counted in memory_used_
  };
  // What one thread has found out about its slots.
  struct Found {
    std::vector<std::uint64_t> misses;  // ascending
    std::uint64_t hits = 0;
    std::uint64_t absent = 0;
  };

  Tier(Shard& shard, const std::string& directory, std::size_t memory, TierMemory* shared,
       ReadQueue::Engine engine);

  void bring(const SlotSlices& batch, RowLocations& locations, Use use);
  std::vector<Found> look_up(const SlotSlices& batch, RowLocations& locations, Use use,
                             std::span<std::size_t> needed);
  void read_missing(std::span<const std::uint64_t> misses);
  Found look_up(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end, Use use,
                std::span<std::size_t> needed);
  void after(const SlotSlices& batch, Use use) noexcept;
  void wake_cleaner() noexcept;
  void load_slot(std::size_t place);
  void begin_changes(std::size_t place) noexcept;
  void end_slot(std::size_t place, bool changes, std::span<const std::uint64_t> before);
  std::vector<std::uint64_t> hashes_in_memory(std::size_t place) const;

  void clean() noexcept;
  void remember(const SlotSlices& batch);
  std::vector<std::uint64_t> remembered(std::size_t place) const;
  void make_room(const SlotSlices& batch, std::span<const std::size_t> needed);
  void trim(std::size_t place, std::span<const std::uint64_t> spared, bool keeps_hot);
  void write_run(std::size_t place, std::span<const SlotTable::Entry> entries);
  std::vector<bool> chosen(const SlotTier& slot, std::span<const SlotTable::Entry> entries,
                           std::span<const std::uint64_t> spared, bool keeps_hot) const;

  std::size_t places() const noexcept { return slots_.size(); }
  std::size_t place_of(std::uint64_t hash) const noexcept {
    return index_of(shard_.slots().of(hash)) - shard_.first_slot();
  }
  Slot slot_of(std::size_t place) const noexcept {
    return Slot{static_cast<std::uint32_t>(shard_.first_slot() + place)};
  }
  std::size_t memory() const noexcept;
  // Of a row in memory, about.
  std::size_t row_share() const noexcept { return shape_.row_bytes + 2 * sizeof(std::uint64_t); }
  // Counts the bytes of a slot anew.
  void note(std::size_t place) noexcept;
  std::size_t index_bytes(const SlotTier& slot) const noexcept;

  Shard& shard_;
  ShardResidency residency_;
  PageShape shape_;
  PageFile file_;  // before the runs, which return their chunks to it
  std::size_t memory_;
  std::optional<TierMemory::Part> shared_;  // instead of memory_
  std::vector<SlotTier> slots_;
  std::size_t heat_rows_ = 0;  // of a slot: as many as fit in memory
  std::size_t memory_used_ = 0;
  std::size_t hand_ = 0;
  std::mutex turn_;
  std::mutex mutex_;
  TierStats counted_;  // of calls; the rest is computed
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> found_{0};
  std::atomic<std::uint64_t> prefetched_{0};
  std::atomic<std::uint64_t> absent_reads_{0};
  std::atomic<std::uint64_t> merges_{0};
  std::atomic<std::uint64_t> merged_read_{0};
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> background_merges_{0};
  ReadAhead ahead_;  // after the runs and the file, which it uses

  static constexpr std::size_t kRemembered = 4;               // calls
  std::array<std::vector<std::uint64_t>, kRemembered> last_;  // ascending hashes
  std::size_t next_last_ = 0;
  std::size_t needed_ = 0;               // bytes, of the calls before
  std::atomic<std::size_t> callers_{0};  // that wait for their turn
  // A forked child leaves it alone: the lock may never be released there.
  struct Signal {
    std::mutex mutex;
    std::condition_variable wake;
    bool is_due = false;
    bool stops = false;
  };
  std::unique_ptr<Signal> signal_ = std::make_unique<Signal>();
  std::unique_ptr<Thread> cleaner_;  // last: it uses all others; starts with the first eviction
};

template <class Op>
auto Tier::with_rows(const SlotSlices& batch, RowLocations* locations, Use use, const Op& op) {
  if (use != Use::kReads) {
    residency_.wait_for_save(batch.hashes.size());  // while slots can be taken
  }
  const auto lock = enter();
  residency_.check(batch);
  RowLocations own(batch.hashes);
  RowLocations& known = locations != nullptr ? *locations : own;
  struct After {
    Tier& tier;
    const SlotSlices& batch;
    Use use;
    ~After() { tier.after(batch, use); }
  };
  const After counts{*this, batch, use};
  bring(batch, known, use);
  ahead_.trim();
  remember(batch);
  counted_.rows_changed += use != Use::kReads ? batch.hashes.size() : 0;
  return op(known);
}

template <class Op>
std::size_t Tier::with_section(std::size_t rows, std::span<const std::byte> section, std::size_t first,
                               std::size_t end, const Op& op) {
  const std::vector<std::uint64_t> all = residency_.hashes_of(rows, section);
  const auto row_of = [&](std::size_t bound) {  // the first row of that slot or a later one
    return static_cast<std::size_t>(
        std::ranges::partition_point(
            all, [&](std::uint64_t hash) { return index_of(shard_.slots().of(hash)) < bound; }) -
        all.begin());
  };
  const std::size_t from = row_of(std::max(first, shard_.first_slot()));
  const std::size_t to = std::max(from, row_of(std::min(end, shard_.end_slot())));
  const auto hashes = std::span(all).subspan(from, to - from);
  residency_.wait_for_save(hashes.size());
  // A section may be of more slots than fit in memory.
  const std::size_t most = std::max<std::size_t>(1, memory() / 4 / row_share());
  std::size_t added = hashes.empty() ? op(first, first) : 0;
  for (std::size_t at = 0; at < hashes.size();) {
    const std::size_t first_place = place_of(hashes[at]);
    std::size_t last = at;
    std::size_t end_place = first_place;
    do {
      end_place = place_of(hashes[last]) + 1;
      last = static_cast<std::size_t>(
          std::partition_point(hashes.begin() + static_cast<std::ptrdiff_t>(last), hashes.end(),
                               [&](std::uint64_t hash) { return place_of(hash) < end_place; }) -
          hashes.begin());
    } while (last < hashes.size() && last - at < most);
    const auto some = hashes.subspan(at, last - at);
    std::vector<std::uint64_t> offsets(places() + 1);
    for (std::size_t s = 0; s <= places(); ++s) {
      offsets[s] = static_cast<std::uint64_t>(
          std::ranges::partition_point(some, [&](std::uint64_t hash) { return place_of(hash) < s; }) -
          some.begin());
    }
    added += with_rows({some, offsets}, nullptr, Use::kCreates, [&](RowLocations&) {
      return op(shard_.first_slot() + first_place, shard_.first_slot() + end_place);
    });
    at = last;
  }
  return added;
}

template <class Op>
auto Tier::with_slot(std::size_t place, bool changes, const Op& op) {
  const std::vector<std::uint64_t> before = hashes_in_memory(place);
  try {
    load_slot(place);
    if (changes) {
      begin_changes(place);
    }
    if constexpr (std::is_void_v<decltype(op())>) {
      op();
      end_slot(place, changes, before);
    } else {
      auto result = op();
      end_slot(place, changes, before);
      return result;
    }
  } catch (...) {
    note(place);
    throw;
  }
}

}  // namespace shoal
