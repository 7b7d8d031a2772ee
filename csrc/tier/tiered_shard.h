// TieredShard: a table of which only a part is in memory; the rest is on disk, in one sorted run a slot (tier/run.h).
//
// Idea. Rows are computed in memory alone, by a Shard. Before it processes a batch, the rows of the batch that are on disk are brought
// into it, exactly as they were; so every result is that of a table in memory, bit for bit.
//
//   bring    finds the batch's rows in memory; those absent there, and present by their run's filter, are read, each with one read of
//            a page, many at a time
//   evict    before that, if memory would not suffice: a hand goes around the slots. Of a slot it keeps the rows that are used often and
//            drops the others; if some row of the slot has changed, all its rows in memory are first merged with its run into a new one
//            that replaces the old in one assignment. The hand leaves slots to fill up while it goes around, so a merge of a whole run
//            is shared by many changed rows
//   ahead    rows of calls to come are read meanwhile, where they are known (tier/read_ahead.h)
//   heat     counters that say which rows were used again (tier/heat.h), halved when the hand passes
//   whole    functions of all rows bring in one slot at a time, all of it, and then drop what they have brought
//
// Invariants (verify() checks them)
//   I1  those of the shard
//   I2  a row of a run is valid unless a row of that hash is in memory or in `erased`
//   I3  covered is the number of rows of the run that I2 makes invalid; so a slot has rows in memory + run - covered rows
//   I4  in a slot that has not changed, every row in memory equals that of the run, and erased is empty
//   I5  a row that was read ahead, and was not used, equals that of the run
//
// A failing disk: a call throws TierStorageError or TierCorruptionError before its shard has begun, and no row is lost or changed;
// functions of all rows that change them may have finished some slots.
//
// Memory: rows, index, filters, fences and heat are at most `memory` bytes; besides, working memory of 4 MiB a thread, an eighth of
// `memory` for rows that are read ahead, one slot during a function of all rows, and what a save must keep.
//
// Threads: any number of callers; calls are processed one at a time, each by all threads of the pool. Locks, in this order: turn_, mutex_,
// then those of the shard.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "shard/reductions.h"
#include "shard/residency.h"
#include "shard/shard.h"
#include "shard/snapshot.h"
#include "tier/heat.h"
#include "tier/page_file.h"
#include "tier/read_ahead.h"
#include "tier/run.h"

namespace shoal {

struct TierStats {
  std::uint64_t rows_in_memory = 0;
  std::uint64_t rows_on_disk = 0;  // valid or not
  std::uint64_t memory_bytes = 0;  // what is compared with the limit
  std::uint64_t index_bytes = 0;   // of that: filters, fences and heat
  std::uint64_t disk_bytes = 0;    // of the file
  std::uint64_t hits = 0;          // keys of batches whose rows were in memory
  std::uint64_t misses = 0;        // read from the disk
  std::uint64_t prefetched = 0;    // of these, before the call that needed them
  std::uint64_t absent = 0;        // neither in memory nor on disk
  std::uint64_t absent_reads = 0;  // of these, for which a page was read
  std::uint64_t reads = 0;         // pages read for batches
  std::uint64_t merges = 0;        // runs written
  std::uint64_t merged_bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t rows_changed =
      0;  // keys of calls that change rows: rows_changed x row bytes is what had to be written
  bool is_direct = false;
  bool is_async = false;
};

class TieredShard {
 public:
  static constexpr std::size_t kMinSlotBytes = 4096;

  // The shard must have no rows, budget or MaxRows rule. Throws TierStorageError.
  TieredShard(std::unique_ptr<Shard> shard, const std::string& directory, std::size_t memory,
              ReadQueue::Engine engine = ReadQueue::Engine::kBest);
  ~TieredShard();

  // What does not depend on the rows.
  Shard& shard() noexcept { return *shard_; }
  const Shard& shard() const noexcept { return *shard_; }

  // As those of Shard.
  void pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations);
  void pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations);
  std::uint64_t push(const SlotSlices& batch, std::span<const float> grads,
                     const OccurrenceCounts& occurrences, RowLocations* locations);
  std::uint64_t push_per_key(const KeyBatch& batch, std::span<const float> grads,
                             const OccurrenceCounts& occurrences, RowLocations* locations);
  void assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock);
  std::size_t erase(const SlotSlices& batch);
  void contains(const SlotSlices& batch, std::span<std::uint8_t> there);
  void state(const SlotSlices& batch, std::size_t column, std::span<float> values);
  void metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values);
  void locate(const SlotSlices& batch, RowLocations& locations);
  // Begins to read the rows of a later call that are on disk, and locates the others.
  void prefetch(const SlotSlices& batch, RowLocations* locations);

  std::size_t section(Slot slot, std::vector<std::byte>& bytes);
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  std::size_t restore(std::size_t rows, std::span<const std::byte> section);
  std::vector<double> reduce(Function function, std::span<const double> parameters);
  std::vector<std::uint64_t> sweep(std::uint32_t store_clock, std::span<const Expiry> rules, bool dry_run);

  void pause_writers();
  void resume_writers();

  std::size_t size();
  // Rows and bytes are those of the whole table, and of its memory.
  ShardStats stats();
  TierStats tier_stats();
  std::size_t ahead_bytes();  // of rows that are read ahead
  std::string verify();
  const PageFile& file() const noexcept { return file_; }

 private:
  friend class TieredSnapshot;

  struct TieredSlot {
    TieredSlot(unsigned slot_bits, std::size_t rows) : heat(slot_bits, rows) {}
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
  enum class Use : std::uint8_t { kPrefetches, kReads, kChanges, kCreates };

  // The calling thread's turn, and the lock of everything here.
  std::unique_lock<std::mutex> enter();

  // Calls op(locations) with all rows of the batch in memory.
  template <class Op>
  auto with_rows(const SlotSlices& batch, RowLocations* locations, Use use, const Op& op);
  void bring(const SlotSlices& batch, RowLocations& locations, Use use);
  std::vector<Found> look_up(const SlotSlices& batch, RowLocations& locations, Use use,
                             std::span<std::size_t> needed);
  void read_missing(std::span<const std::uint64_t> misses);
  Found look_up(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end, Use use,
                std::span<std::size_t> needed);
  template <class Op>
  auto with_slot(std::size_t place, bool changes, const Op& op);
  void load_slot(std::size_t place);

  void make_room(const SlotSlices& batch, std::span<const std::size_t> needed);
  void trim(std::size_t place, std::span<const std::uint64_t> spared, bool keeps_hot);
  void write_run(std::size_t place, std::span<const SlotTable::Entry> entries);
  std::vector<bool> chosen(const TieredSlot& slot, std::span<const SlotTable::Entry> entries,
                           std::span<const std::uint64_t> spared, bool keeps_hot) const;

  std::size_t logical_rows(std::size_t place) const noexcept;
  std::size_t places() const noexcept { return slots_.size(); }
  std::size_t place_of(std::uint64_t hash) const noexcept { return index_of(shard_->slots().of(hash)); }
  // Counts the bytes of a slot anew.
  void note(std::size_t place) noexcept;
  std::size_t index_bytes(const TieredSlot& slot) const noexcept;
  std::size_t tier_index_bytes() const noexcept;  // of all slots

  std::unique_ptr<Shard> shard_;
  ShardResidency residency_;
  PageShape shape_;
  PageFile file_;  // before the runs, which return their chunks to it
  std::size_t memory_;
  std::vector<TieredSlot> slots_;
  std::size_t memory_used_ = 0;
  std::size_t hot_rows_;  // that a slot keeps at most
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
  ReadAhead ahead_;  // after the runs and the file, which it uses
};

// Snapshot of a tiered table: as Snapshot, whose take of a slot brings the slot into memory first.
class TieredSnapshot {
 public:
  TieredSnapshot(TieredShard& shard, std::uint32_t store_clock, Snapshot::Kind kind, std::size_t most,
                 Purpose purpose);

  Snapshot& inner() noexcept { return inner_; }
  const Snapshot& inner() const noexcept { return inner_; }
  std::size_t rows() const noexcept { return rows_; }
  std::size_t bytes() const noexcept { return bytes_; }

  Snapshot::Piece take(Slot slot);
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  Snapshot::Ranges read_changes(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);

 private:
  TieredShard& shard_;
  std::size_t rows_ = 0;
  std::size_t bytes_ = 0;
  Snapshot inner_;
};

}  // namespace shoal
