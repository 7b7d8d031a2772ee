// ShardCore: what the operations on a shard's rows share: its slots, the order of their locks, and the passes
// over a batch. The Shard has one; operations on whole slots (shard/snapshot.h, shard/shard_copy.h,
// shard/reductions.h) and the shard's source (shard/residency.h) work on it.
//
// Threads: any number of callers. Locks, in this order:
//   1. the turn      if there is a source: calls run one at a time
//   2. writers       the gate of calls that change rows
//   3. budget        if there is a memory budget: calls that change tables run one at a time
//   4. slot locks    in ascending order, a few adjacent slots at a time (shard/probe_pipeline.h); readers
//                    share a slot
//   5. changes       its mutex, for moments
// Fork: a call in a child process throws WrongProcessError.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "base/mix.h"
#include "base/threads.h"
#include "policy/admission.h"
#include "policy/budget.h"
#include "shard/change_log.h"
#include "shard/initial_row.h"
#include "shard/owner_process.h"
#include "shard/row_locations.h"
#include "shard/row_source.h"
#include "shard/rows.h"
#include "shard/shard_budget.h"
#include "shard/shard_stats.h"
#include "shard/slot_state.h"
#include "shard/table_spec.h"
#include "shard/writer_gate.h"

namespace shoal {

struct ShardCore {
  static constexpr std::size_t kAllSlots = std::numeric_limits<std::size_t>::max();  // as an end

  ShardCore(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks, Budget* budget,
            std::size_t first, std::size_t end);

  // --- slots -----------------------------------------------------------------------------------------------

  std::size_t end() const noexcept { return first + states.size(); }
  void check_slots(std::size_t begin, std::size_t end) const;
  void check_batch(const SlotSlices& batch) const;
  // The state of a slot, which must be here.
  SlotState& at(Slot slot) const;
  // Place of a hash's slot among those here; states, and the offsets of batches, are indexed by it.
  std::size_t place_of(std::uint64_t hash) const noexcept { return index_of(slots.of(hash)) - first; }
  struct RowBytes {
    std::size_t rows;
    std::size_t bytes;
  };
  // Of all rows. The caller has paused the writers.
  RowBytes rows_and_bytes() const;

  // --- locks -----------------------------------------------------------------------------------------------

  using Turn = std::unique_lock<RowSource>;  // without a source: empty
  Turn turn() const;
  // A turn with the rows of a batch in memory. With a source all are known in `locations` then, which are its
  // own if there are none.
  Turn bring(const SlotSlices& batch, RowLocations*& locations, RowSource::Use use) const {
    Turn turn;
    if (source != nullptr) [[unlikely]] {
      turn = this->turn();
      locations = &source->bring(batch, locations, use);
    }
    return turn;
  }
  std::size_t rows_elsewhere(std::size_t place) const noexcept {
    return source == nullptr ? 0 : source->rows_elsewhere(place);
  }
  // What a call holds that changes the rows of a batch.
  struct Writing {
    Turn turn;
    std::shared_lock<std::shared_mutex> writers;
    std::unique_lock<std::mutex> budget;
  };
  Writing begin_writing(const SlotSlices& batch, RowLocations*& locations, RowSource::Use use);
  // Calls use(a, b) for ranges of slots, in order, which together are [begin, end), until it returns false:
  // all at once, or with a source each slot in a turn of its own, with its rows in memory. `is_change`: it
  // may change them.
  void with_slots(std::size_t begin, std::size_t end, bool is_change,
                  const std::function<bool(std::size_t, std::size_t)>& use) const;
  // Waits for a save before a slot changes within with_slots(), which with a source has waited before the
  // turn.
  void wait_in_slots(std::size_t changed_rows) const {
    if (source == nullptr) {
      changes.wait(changed_rows);
    }
  }

  // --- passes over a batch: shard/walk.h -------------------------------------------------------------------

  // Calls work(begin, end) in the pool's threads for places of slots that together cover the batch.
  template <class Work>
  void split(const SlotSlices& batch, const Work& work) const;
  // Known row locations, and where to record those that are found; null: none.
  struct Known {
    const RowLocations* before = nullptr;
    RowLocations* after = nullptr;
  };
  Known known(const SlotSlices& batch, RowLocations* locations) const;
  // Records in `locations`, which known() has prepared, the rows of the slots with places from `begin` to
  // `end`.
  template <class Lock>
  void find(const SlotSlices& batch, RowLocations& locations, std::size_t begin, std::size_t end) const;
  // Runs a ProbePipeline with its own worker in each thread. Lock is that of a slot.
  template <class Lock, class MakeWorker>
  void walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const;

  // Memory for a Workspace: null if several threads would share it.
  ShardScratch* usable(ShardScratch* scratch) const noexcept {
    return pool.threads() == 1 ? scratch : nullptr;
  }

  // --- rows whose slot is locked ---------------------------------------------------------------------------

  // Reads their weights: dim floats each.
  void weights_of(std::span<std::byte* const> rows, float* weights) const;
  void read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                    std::vector<float>& weights) const;
  // Records occurrences in their metadata; null rows are passed over.
  void see(std::span<std::byte* const> found, std::span<const std::uint32_t> counts,
           std::uint32_t now) noexcept;

  SlotStates new_states(std::size_t end_slot);

  TableSpec spec;
  Slots slots;  // of the whole table
  std::size_t first;
  ThreadPool& pool;
  Rows rows;
  Layout layout;
  Chunks chunks;
  AdmissionConfig admission;
  InitialRow initial_row;
  std::uint64_t number;  // unique in the process
  OwnerProcess owner;
  Layout numbers;                                  // of a PreImageLog
  std::unique_ptr<std::shared_mutex> common_lock;  // the lock of all slots (Locks::kOne), else null
  SlotStates states;
  ShardBudget budget;
  WriterGate writers;
  mutable ChangeLog changes;
  mutable ShardCounters counters;
  std::atomic<std::uint64_t> step{0};            // of the last push
  std::atomic<double> rate{1};                   // factor of the learning rate
  std::atomic<std::uint32_t> origin{0};          // table clock minus store clock
  std::shared_ptr<Buffer<std::byte>> user_rows;  // of steps of a UserRule; arrays over it may outlive them
  std::unique_ptr<RowSource> source;             // last: it uses the tables; null: all rows are in memory
};

}  // namespace shoal
