// Tier: a RowSource (shard/row_source.h) with its rows on disk, in one sorted run a slot (tier/run.h).
// tier.cc has what is brought and evicted, docs/decisions/0037 why.
//
// Invariants (verify() checks them)
//   I1  those of every RowSource
//   I2  a row of a run is valid unless a row of that hash is in memory or in `erased`
//   I3  covered is the number of rows of the run that I2 makes invalid: run - covered rows are not in memory
//   I4  in a slot that has not changed, every row in memory equals that of the run, and erased is empty
//   I5  a row that was read ahead, and was not used, equals that of the run
//
// A failing disk: a call throws TierStorageError or TierCorruptionError before its shard has begun; functions
// of all rows that change them may have finished some slots.
//
// Threads: callers in turns, and a thread of its own that evicts between them. Locks, in this order: turn_,
// mutex_.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"
#include "shard/residency.h"
#include "shard/row_source.h"
#include "shard/shard.h"
#include "shard/tier_stats.h"
#include "tier/page_file.h"
#include "tier/read_ahead.h"
#include "tier/run.h"
#include "tier/tier_memory.h"
#include "tier/use_counters.h"

namespace shoal {

class Tier final : public RowSource {
 public:
  static constexpr std::size_t kMinSlotBytes = 4096;

  // Whether a table can have a tier: not with MaxRows, which ranks all rows of a slot at each push.
  static bool suits(const TableSpec& spec) noexcept;

  // For a shard of which it becomes the source. Either memory of its own, in which all rows of a batch must
  // fit; or a part of some that is shared, which a batch exceeds if it has to, so that what is executed does
  // not depend on what is in memory. std::invalid_argument: less than kMinSlotBytes of its own for each slot,
  // or the table does not suit. Throws TierStorageError.
  Tier(Shard& shard, const std::string& directory, std::size_t memory,
       ReadQueue::Engine engine = ReadQueue::Engine::kBest);
  Tier(Shard& shard, const std::string& directory, TierMemory& memory);
  ~Tier() override;

  void lock() override;
  void unlock() noexcept override;
  RowLocations& bring(const SlotSlices& batch, RowLocations* locations, Use use) override;
  // Then drops the rows that were brought in, if there is no room for them.
  void with_slot(std::size_t place, bool changes, const std::function<void()>& use) override;
  void prefetch(const SlotSlices& batch, RowLocations* locations) override;
  std::size_t rows_elsewhere(std::size_t place) const noexcept override;
  TierStats stats() const override;
  std::string verify() override;

  // In a turn.
  std::size_t ahead_bytes() const noexcept { return ahead_.bytes(); }  // of rows that are read ahead
  const PageFile& file() const noexcept { return file_; }

 private:
  struct SlotTier {
    SlotTier(unsigned slot_bits, std::size_t rows) : uses(slot_bits, rows) {}
    std::unique_ptr<Run> run;
    std::size_t covered = 0;
    std::vector<std::uint64_t> erased;  // ascending; hashes that the run may have
    bool changed = false;
    UseCounters uses;
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

  std::vector<Found> look_up(const SlotSlices& batch, RowLocations& locations, Use use,
                             std::span<std::size_t> needed);
  void read_missing(std::span<const std::uint64_t> misses);
  Found look_up(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end, Use use,
                std::span<std::size_t> needed);
  void before_erase(const SlotSlices& batch);
  void wake_cleaner() noexcept;
  void load_slot(std::size_t place);
  void begin_changes(std::size_t place) noexcept;
  void end_slot(std::size_t place, bool changes, std::span<const std::uint64_t> before);
  std::vector<std::uint64_t> hashes_in_memory(std::size_t place) const;

  void clean() noexcept;
  void remember(const SlotSlices& batch);
  std::vector<std::uint64_t> remembered(std::size_t place) const;
  void make_room(const SlotSlices& batch, std::span<const std::size_t> needed);
  void trim(std::size_t place, std::span<const std::uint64_t> spared, bool keeps_used);
  void write_run(std::size_t place, std::span<const SlotTable::Entry> entries);
  std::vector<bool> chosen(const SlotTier& slot, std::span<const SlotTable::Entry> entries,
                           std::span<const std::uint64_t> spared, bool keeps_used) const;

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
  std::size_t rows_of(std::size_t place) const noexcept;
  // Counts the bytes of a slot anew.
  void note(std::size_t place) noexcept;
  std::size_t index_bytes() const noexcept;
  std::size_t index_bytes(const SlotTier& slot) const noexcept;

  Shard& shard_;
  ShardResidency residency_;
  PageShape shape_;
  PageFile file_;  // before the runs, which return their chunks to it
  std::size_t memory_;
  std::optional<TierMemory::Part> shared_;  // instead of memory_
  std::vector<SlotTier> slots_;
  std::size_t counted_rows_ = 0;  // of a slot: as many as fit in memory
  std::size_t memory_used_ = 0;
  std::size_t next_place_ = 0;
  Mutex turn_;        // whose turn is next
  std::mutex mutex_;  // of the turn, and of everything here
  // What the turn has brought.
  struct Brought {
    SlotSlices batch;
    Use use;
  };
  std::optional<Brought> brought_;
  std::optional<RowLocations> locations_;  // of a batch that has none
  TierStats counted_;                      // of calls; the rest is computed
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
    Mutex mutex;
    CondVar wake;
    bool is_due GUARDED_BY(mutex) = false;
    bool stops GUARDED_BY(mutex) = false;
  };
  std::unique_ptr<Signal> signal_ = std::make_unique<Signal>();
  std::unique_ptr<Thread> cleaner_;  // last: it uses all others; starts with the first eviction
};

}  // namespace shoal
