// Shard: the slots of one table that one process holds, and what can be asked of them.
//
// Idea. Every request is a batch in hash order, each hash once, cut by slot (batch/key_batch.h makes one). A thread takes
// a run of slots and walks it: lock a slot, find its rows, step them run by run in place, unlock. Results depend on
// the batch alone: not on threads, nor on the number of slots.
//
//   pull     never creates a row; an unseen key reads the row that it would be given
//   push     one optimizer step per row, creating rows; a row with an all-zero gradient keeps every bit; a row whose
//            gradient or whose new value is not finite stays whole, and is counted
//            a key that the table's admission rule does not admit yet gets none, and its gradient is dropped
//   assign   sets weights, creating rows; the optimizer's state of a row that is there stays
//   transform_weights  sets other weights for all rows; shard/reductions.h is made of it and of read_slot
//
// Invariants (verify() checks them)
//   every SlotTable's own (I1 to I5)
//
// Threads. Any number of callers. Locks, in this order:
//   1. writers_mutex_   shared by push, assign, erase, transform_weights and restore; alone by freeze(), for the moment that a save is of. A
//              waiting freeze stops new writers first (pause_mutex_), so that it cannot starve.
//   2. turn    of the memory budget, where there is one: calls that change tables come one by one
//   3. slots   in ascending order, some neighbours at a time: the next ones' lines are fetched while these are worked on
//              (shard/probe_pipeline.h). Readers share a slot. No row is ever seen half written.
//      A shard whose calls come one at a time anyway, as a data loop's do, may have one lock for all slots (Locks::kOne).
// Fork: a child's copy of a shard throws WrongProcessError: its locks may be held by threads that the child does not have.
// Memory: std::bad_alloc in a push leaves every row whole; rows before the failing slot are stepped, others are not. Of
// keys that wait, those of the run that fails may have been counted: if the push is made again, they are admitted early.

#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/mix.h"
#include "base/threads.h"
#include "batch/key_batch.h"
#include "optim/init.h"
#include "optim/optimizer.h"
#include "policy/admission.h"
#include "policy/budget.h"
#include "policy/lifecycle.h"
#include "shard/probe_pipeline.h"
#include "shard/row_locations.h"
#include "shard/rows.h"
#include "table/slot_table.h"

namespace shoal {

struct WrongProcessError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a table is: the same on every server, written into every manifest.
struct TableSpec {
  std::size_t dim;
  Dtype dtype;
  Optimizer optimizer;
  Init init;
  std::uint64_t seed;  // of the rounding noise
  Lifecycle lifecycle = {};
};

// When and how often the keys of a push were sighted (policy/lifecycle.h).
struct OccurrenceCounts {
  std::span<const std::uint32_t> counts = {};  // of each hash, 1 or more; none: once each
  std::uint32_t clock = 0;                     // the store's
};

// A batch as a shard takes it: hashes ascend strictly, slot s is [offsets[s], offsets[s + 1]).
struct SlotSlices {
  std::span<const std::uint64_t> hashes;
  std::span<const std::uint64_t> offsets;
};

struct ShardStats {
  std::uint64_t rows = 0;
  std::uint64_t cells = 0;  // rows there is place for without growing: rows / cells is the load
  std::uint64_t bytes = 0;
  std::uint64_t pulls = 0;  // calls
  std::uint64_t pushes = 0;
  std::uint64_t rows_pulled = 0;
  std::uint64_t rows_pushed = 0;
  std::uint64_t rows_created = 0;
  std::uint64_t rows_erased = 0;
  std::uint64_t nonfinite_rows = 0;
  std::uint64_t refused = 0;                               // sightings of keys that got no row by them
  std::uint64_t waiting = 0;                               // keys that an exact count is kept of
  std::array<std::uint64_t, Expiry::kKinds> expired = {};  // rows, by the kind of the rule
  SlotTable::Growth growth;                                // of all slots; the longest of any
};

// Whether calls may work on different slots at a time, or a writer has all of them: cheaper where there is one caller.
enum class Locks : std::uint8_t { kBySlot, kOne };

class Shard {
 public:
  // The pool must outlive the shard.
  // So must the budget, where there is one. MemoryBudgetExceededError: not even an empty table has room.
  Shard(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks = Locks::kBySlot,
        Budget* budget = nullptr);
  ~Shard();
  // While it is saved: whether so many rows can be changed with what may be kept of them. With one lock for all slots no
  // change waits until they can; the save is lost if much more has to be kept.
  bool is_saving() const noexcept { return saving_.active.load() && !saving_.lost.load(); }
  bool fits_save(std::size_t rows) const noexcept;
  // Gives back what it has of the budget before it is destroyed, which may take longer; nothing else may follow.
  void leave_budget();
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  const TableSpec& spec() const noexcept { return spec_; }
  const Slots& slots() const noexcept { return slots_; }
  const Rows& rows() const noexcept { return rows_; }
  ThreadPool& pool() const noexcept { return pool_; }

  // The number of the last push; 1 is the first.
  std::uint64_t step() const noexcept { return step_.load(std::memory_order_relaxed); }
  void set_step(std::uint64_t step) noexcept { step_.store(step, std::memory_order_relaxed); }

  // Rows keep the table's clock: the store's and a difference, so that a table goes on where a checkpoint left it though
  // the store's clock begins anew.
  std::uint32_t table_clock(std::uint32_t store_clock) const noexcept {
    return store_clock + origin_.load(std::memory_order_relaxed);
  }
  void set_clock(std::uint32_t table_clock, std::uint32_t store_clock) noexcept {
    origin_.store(table_clock - store_clock, std::memory_order_relaxed);
  }

  // Where there are `where` that are of this batch, what they know is not searched, and they know all rows afterwards.
  void pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations = nullptr) const;
  // The same for every key as it was given, without a row for each unique one between.
  void pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations = nullptr) const;
  // Only finds the rows: in this thread, for whoever works ahead of the pool's.
  void locate(const SlotSlices& batch, RowLocations& locations) const;
  // Returns the number of the step: the next one of the table, taken once all is checked and no save is under way.
  // In a pool of one thread `stepped` counts the rows that have their step, from the front of the batch; so it tells how
  // far a push came that throws.
  std::uint64_t push(const SlotSlices& batch, std::span<const float> grads,
                     const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                     const RowLocations* locations = nullptr);
  // The same of a gradient for every key as it was given: each unique one's are added up when its row is stepped, as by
  // KeyBatch::sum.
  std::uint64_t push_per_key(const KeyBatch& batch, std::span<const float> grads,
                             const OccurrenceCounts& occurrences = {},
                             const RowLocations* locations = nullptr);
  // Counts as one sighting of each key.
  void assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock = 0);
  std::size_t erase(const SlotSlices& batch);
  void contains(const SlotSlices& batch, std::span<std::uint8_t> there) const;
  // Column k of the batch's rows as float32, dim a row (1 a row for the row state, k == rows().columns()).
  void state(const SlotSlices& batch, std::size_t column, std::span<float> values) const;
  // Number k of the marks of the batch's rows (policy/lifecycle.h), bits as they are stored; 0 where there is no row.
  void metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const;

  // --- by slot: checkpoints and iteration (as it was at one moment: shard/snapshot.h) ----------------------------

  // The rows of one slot in ascending order of hash, in columns: hashes, then each column as stored, each column's
  // start aligned to kSectionAlignment. Offsets are section_offsets(rows).
  std::size_t section(Slot slot, std::vector<std::byte>& bytes) const;  // returns the rows
  std::vector<std::size_t> section_offsets(
      std::size_t rows) const;  // rows().stored() + 2 numbers: the last is the size
  static constexpr std::size_t kSectionAlignment = 64;
  static constexpr std::size_t kAllSlots = std::numeric_limits<std::size_t>::max();  // as an end

  // Adds the rows of a section, which may come from any cut of the hash space, to a table that has none of them. A wrong
  // size or hashes that do not ascend: std::invalid_argument, nothing changed. A row that is there already: the same,
  // and slots before its own are restored. Rows of other slots than [first, end) are left out. Returns how many it added.
  std::size_t restore(std::size_t rows, std::span<const std::byte> section, std::size_t first = 0,
                      std::size_t end = kAllSlots);
  // The section of a slot of any cut as it is after a delta: of the base's rows those that lie in no range, and the delta's
  // rows, all of which do. Returns how many. Anything else: std::invalid_argument. Looks at no row of the table.
  std::size_t merge(std::size_t base_rows, std::span<const std::byte> base, std::size_t delta_rows,
                    std::span<const std::byte> delta, const DirtyRanges& ranges,
                    std::vector<std::byte>& merged) const;
  // Room for as many rows in each slot of `cut`: what restore needs to fill a table in one pass.
  void reserve(Slots cut, std::span<const std::size_t> rows);

  // Sums, modulo 2^64, over the rows of one slot of two numbers that are made of all that is stored of a row. Tables with
  // the same sums over all slots have the same rows, but for one chance in 2^128: in whatever order, in however many slots.
  std::array<std::uint64_t, 2> digest(Slot slot) const;

  // Hashes and weights of one slot in ascending order of hash.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const;

  // Other weights for all rows of the slots [first, end): change(weights) is given those of some rows in place. Weights
  // that keep their bits keep all that belongs to them; the others move as by the optimizer's move(), or are set. Returns
  // how many rows of each slot changed. As in a push, a row that would not be finite stays whole and is counted. With a
  // pool of one thread std::bad_alloc changes nothing: all memory is taken first.
  std::vector<std::size_t> transform_weights(std::size_t first, std::size_t end,
                                             const std::function<void(std::span<float>)>& change);

  // Writers wait from freeze() to thaw(); called in pairs by one thread.
  void pause_writers();
  void resume_writers();

  // Which save's delta, or export's, the next one could be: what has changed since is known. "": none's.
  std::string base(Purpose purpose = Purpose::kSave) const;
  // From here on what changes is remembered, as if the rows had just been saved so. Nobody else uses the shard yet.
  void track(std::string base);

  // --- lifecycle ------------------------------------------------------------------------------------------------

  // Drops the rows of the slots [first, end) that the rules name (shard/expiry.cc); an empty list stands for the table's
  // own. A dry run changes nothing, and says what would be dropped, and what would be at other thresholds. The answer is
  // words, which may be added up over parts of the slots, word by word:
  //
  //   0           rows before
  //   1, 2        bytes before and after (a dry run: both are those before)
  //   3           impressions of all rows: decayed scores at the store's clock where rows keep them, else counts, in
  //               units of 2^-20; 0 where they keep neither
  //   4           waiting keys that were forgotten
  //   5 .. 37     sightings of rows since the last sweep that was none but dry, by how long the row had not been sighted:
  //               0 clocks, 1, 2 to 3, 4 to 7, ...; all 0 where rows keep no clock
  //   38 + 2 k    of rule k: rows that it drops, which no rule before it does; and their impressions
  //   then, of a dry run only, for every rule 64 pairs (rows, impressions), all rows in classes of what it looks at:
  //     an age or a count in classes as above; a score or norm x in class 32 + floor(log2(x)), from 0 to 63
  //
  // A rule that needs what rows do not keep: std::invalid_argument.
  static constexpr std::size_t kAges = 33;
  static constexpr std::size_t kSweepHead = 5 + kAges;
  static constexpr std::size_t kClasses = 64;
  std::vector<std::uint64_t> sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                   std::span<const Expiry> rules, bool dry_run);

  // What a slot's doorkeeper remembers, for checkpoints; and back, from a slot of any cut (policy/admission.h).
  void filter(Slot slot, std::vector<std::byte>& bytes) const;
  // Other slots than [first, end) learn nothing of it.
  void restore_filter(Slots cut, Slot slot, std::span<const std::byte> bytes, std::size_t first = 0,
                      std::size_t end = kAllSlots);

  // What such a table takes in memory at so many rows in all, where pushes made them, and in the sections of a checkpoint.
  // Arithmetic: what the shard holds does not matter.
  std::size_t bytes_at(std::size_t rows) const;
  std::size_t saved_bytes_at(std::size_t rows) const;

  std::size_t size() const;
  ShardStats stats() const;
  // "" where all invariants hold, else which one broke and where.
  std::string verify() const;

 private:
  struct Workspace;  // what one part of a batch works in

  void check_batch(const SlotSlices& batch) const;
  void check_process() const;
  // work(first, end) for runs of slots that together hold the batch, in the pool's threads.
  template <class Work>
  void split(const SlotSlices& batch, const Work& work) const;
  // What a walk may know of its rows, and where it is to note what it finds; null: nothing.
  struct Known {
    const RowLocations* before = nullptr;
    RowLocations* after = nullptr;
  };
  Known known(const SlotSlices& batch, RowLocations* locations) const;
  // A ProbePipeline with a worker() of its own in each thread. Lock is that of a slot.
  template <class Lock, class MakeWorker>
  void walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const;
  // use(workspace, rows, first, ahead) for every run of rows, in order, of which it reads the first `touched` bytes; a row
  // that is not there is the one that it would be given.
  template <class Use>
  void read(const SlotSlices& batch, const Known& known, std::size_t touched, const Use& use) const;
  // use(weights, first) for every run, once its weights are read: into `to`, or where that is null into the workspace.
  template <class Use>
  void read_weights(const SlotSlices& batch, const Known& known, float* to, const Use& use) const;
  // (first, count, room): the gradients of a run's unique hashes, which may be made in the room.
  using Slopes = std::function<const float*(std::size_t, std::size_t, float*)>;
  std::uint64_t step_rows(const SlotSlices& batch, const Slopes& slopes, const OccurrenceCounts& occurrences,
                          std::size_t* stepped, const RowLocations* locations);
  // What a worker that creates rows must know, and what it remembers of its part of a batch.
  struct InsertContext {
    const SlotTable* counted = nullptr;  // the last table whose missing rows were counted
    std::vector<std::byte*> rows = {};   // to work in
    PushTime now = {};
    bool asks = false;                           // whether a key must be admitted
    std::span<const std::uint32_t> counts = {};  // sightings of the batch's keys, none: once each
    std::uint64_t refused = 0;                   // sightings
    const SlotState* at = nullptr;  // the last slot where keys were asked about, and how many of them
    std::size_t asked = 0;
    std::size_t admitted = 0;
  };
  // The same, to be changed, and created where missing. The caller has entered.
  template <class Use>
  void change(const SlotSlices& batch, const InsertContext& how, const Known& known, const Use& use);
  std::shared_lock<std::shared_mutex> enter() const;

  void fill_initial_row(std::uint64_t hash, std::byte* row) const noexcept;
  // Rows of a batch were sighted.
  void see(std::span<std::byte* const> rows, std::span<const std::uint32_t> counts,
           std::uint32_t now) noexcept;
  // The weights of some rows, which somebody has locked: dim floats each.
  void weights_of(std::span<std::byte* const> rows, float* weights) const;
  class ExpiryEvaluator;  // of rows by expiry rules

  // --- for a save: shard/snapshot.cc
  friend class Snapshot;
  // What a save that is under way and those who change rows know of each other.
  struct Saving {
    std::atomic<bool> active{false};
    std::atomic<bool> lost{false};  // there was no memory to keep something in: the save cannot be finished
    std::atomic<std::size_t> left{0};          // slots that are to be saved yet
    std::atomic<std::size_t> kept{0};          // bytes of rows as they were
    std::atomic<std::size_t> most{0};          // from which on changes wait
    std::mutex mutex;                          // the last to be locked
    std::condition_variable taken;             // a slot was saved, or the save has ended
    std::array<std::string, kPurposes> bases;  // guarded by the mutex
  };
  // Rows of these hashes, each once, are about to change, or what the slot's door knows of them; the slot is locked.
  void before_change(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept {
    if (slot.watched) [[unlikely]] {
      keep(slot, hashes);
    }
  }
  void before_change_of_all(SlotState& slot) noexcept;
  void keep(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept;
  // So many rows are about to be changed, and the caller has locked no slot.
  void wait_for_save(std::size_t rows) {
    if (saving_.active.load(std::memory_order_relaxed)) [[unlikely]] {
      wait_for_slots(rows);
    }
  }
  void wait_for_slots(std::size_t rows);
  std::vector<std::uint64_t> hashes_of(std::size_t rows, std::span<const std::byte> section) const;
  std::size_t write_section(std::span<const SlotTable::Entry> entries, std::vector<std::byte>& bytes) const;
  void read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                    std::vector<float>& weights) const;

  // --- under a budget: shard/expiry.cc
  std::unique_lock<std::mutex> lock_budget() const;  // empty where there is no budget
  std::size_t bytes_of(const SlotState& slot) const noexcept;
  // What this table may take in a slot.
  std::size_t allowed(std::size_t slot) const noexcept;
  // Notes what a slot takes now.
  void note(std::size_t slot) noexcept;
  // Room for all rows and waiting keys that the batch may need, if need be in place of others. What does not fit changes
  // nothing: MemoryBudgetExceededError.
  void fit(const SlotSlices& batch, const InsertContext& how);
  [[noreturn]] void throw_over_budget(std::size_t slot, std::size_t rows) const;

  // Drops the `count` rows of a slot that go first by the judge's first rule, but none of those in `spared`, which ascend.
  // Returns how many; std::bad_alloc changes nothing.
  std::size_t evict(SlotState& slot, const ExpiryEvaluator& evaluator, std::size_t count,
                    std::span<const std::uint64_t> spared);
  // Slots of the batch that exceed the rows that an expiry rule allows give some up.
  void enforce_max_rows(const SlotSlices& batch, std::uint32_t now);
  // A slot that misses more than one row in kFewMissing fills: in the next batch its rows are created before it is walked,
  // for inserting moves rows, and every run that has been looked at would be looked at again.
  static constexpr std::size_t kFewMissing = 16;

  // Inserts those of a run's rows that are missing: how many. The run begins at `first`.
  std::size_t create(Probe& run, const SlotSlices& batch, std::size_t first, InsertContext& context) const;
  // The same for all hashes of a slot that a batch has.
  std::size_t create_all(SlotState& slot, std::span<const std::uint64_t> hashes,
                         InsertContext& context) const;
  std::size_t insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                             std::span<std::byte*> rows, std::uint32_t now) const;
  // Asks the slot's doorkeeper about the rows that are missing of those that belong to the batch's hashes from number
  // `first` on, all of that slot, and inserts those that it admits: how many.
  std::size_t admit(SlotState& slot, const SlotSlices& batch, std::span<std::byte*> rows, std::size_t first,
                    InsertContext& context) const;
  // Room for `missing` rows, and for those of the slot's hashes from `next` on that are missing too: ascending hashes,
  // poured into a table that grows in small steps, would all queue up at its front. They are counted once a batch.
  void make_room(SlotTable& table, std::size_t missing, const SlotSlices& batch, std::size_t next,
                 InsertContext& context) const;

  TableSpec spec_;
  Slots slots_;
  ThreadPool& pool_;
  Rows rows_;
  Layout layout_;
  Chunks chunks_;
  AdmissionConfig admission_;
  std::uint64_t number_;  // no other shard of the process has it
  std::size_t stamp_;     // the process that may use this
  mutable std::vector<std::byte>
      initial_row_;  // the initial row where it is the same for every key, else empty
  std::unique_ptr<std::shared_mutex> of_all_;       // the lock of all slots, where they have one
  std::vector<std::unique_ptr<SlotState>> tables_;  // one a slot
  Budget* budget_;
  std::vector<std::size_t> noted_;  // what the budget knows of each slot's bytes
  mutable std::mutex pause_mutex_;
  mutable std::shared_mutex writers_mutex_;
  Layout numbers_;  // of a PreImageLog
  mutable Saving saving_;
  std::atomic<std::uint64_t> step_{0};
  std::atomic<std::uint32_t> origin_{0};  // table clock minus store clock
  mutable std::atomic<std::uint64_t> pulls_{0};
  mutable std::atomic<std::uint64_t> rows_pulled_{0};
  std::atomic<std::uint64_t> pushes_{0};
  std::atomic<std::uint64_t> rows_pushed_{0};
  std::atomic<std::uint64_t> rows_created_{0};
  std::atomic<std::uint64_t> rows_erased_{0};
  std::atomic<std::uint64_t> nonfinite_rows_{0};
  std::atomic<std::uint64_t> refused_{0};
  std::array<std::atomic<std::uint64_t>, Expiry::kKinds> expired_{};
  std::array<std::atomic<std::uint64_t>, kAges> returns_{};
};

}  // namespace shoal
