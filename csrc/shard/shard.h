// Shard: a range of slots of one table, in one process, and the operations on their rows. Every request is a
// batch in hash order, each hash once, divided by slot (batch/key_batch.h). Results depend on the batch
// alone: not on threads, the number of slots, or which rows are in memory (shard/row_source.h).
//
// Its parts are a ShardCore: the slots and the passes over them, the record of changes for saves (ChangeLog),
// the memory budget (ShardBudget), the gate of calls that change rows (WriterGate), and the counters.
// Operations on whole slots work on the core: Snapshot, ShardCopy, reduce(), transform_weights(),
// run_user_function(), and the rows' source by ShardResidency.
//
// Invariants (verify() checks them): those of every SlotTable (I1 to I5), and of the source.
//
// Threads: any number of callers; shard/shard_core.h has the order of the locks. Fork: a copy of a shard in a
// child process throws WrongProcessError.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "batch/key_batch.h"
#include "policy/lifecycle.h"
#include "shard/row_creator.h"
#include "shard/shard_core.h"
#include "shard/tier_stats.h"

namespace shoal {

class Shard final {
 public:
  static constexpr std::size_t kAllSlots = ShardCore::kAllSlots;

  // Holds the slots [first, end). The pool and the budget must outlive the shard. Throws
  // MemoryBudgetExceededError if not even an empty table fits.
  Shard(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks = Locks::kBySlot,
        Budget* budget = nullptr, std::size_t first = 0, std::size_t end = kAllSlots)
      : core_(spec, slots, pool, locks, budget, first, end) {}
  // Rows come from this source, and go to it, from now on. Before the first call.
  void set_source(std::unique_ptr<RowSource> source) noexcept { core_.source = std::move(source); }
  bool has_source() const noexcept { return core_.source != nullptr; }
  // Releases the shard's part of the budget before the destructor runs, which may be much later. Call nothing
  // else after it.
  void leave_budget() { core_.budget.leave(); }

  const TableSpec& spec() const noexcept { return core_.spec; }
  const Slots& slots() const noexcept { return core_.slots; }  // of the whole table
  std::size_t first_slot() const noexcept { return core_.first; }
  std::size_t end_slot() const noexcept { return core_.end(); }
  const Rows& rows() const noexcept { return core_.rows; }
  ThreadPool& pool() const noexcept { return core_.pool; }
  // What is recorded of changes for saves.
  ChangeLog& changes() const noexcept { return core_.changes; }
  ShardCore& core() noexcept { return core_; }
  const ShardCore& core() const noexcept { return core_; }

  // Number of the last push; the first is 1.
  std::uint64_t step() const noexcept { return core_.step.load(std::memory_order_relaxed); }
  void set_step(std::uint64_t step) noexcept { core_.step.store(step, std::memory_order_relaxed); }

  // The learning rate of later pushes is that of the rule and its schedule times this. A checkpoint does not
  // have it.
  double rate() const noexcept { return core_.rate.load(std::memory_order_relaxed); }
  void set_rate(double rate) noexcept { core_.rate.store(rate, std::memory_order_relaxed); }

  // Rows store the table's clock: the store's clock plus an offset, so that ages continue after a checkpoint
  // is loaded although the store's clock starts at 0.
  std::uint32_t table_clock(std::uint32_t store_clock) const noexcept {
    return store_clock + core_.origin.load(std::memory_order_relaxed);
  }
  void set_clock(std::uint32_t table_clock, std::uint32_t store_clock) noexcept {
    core_.origin.store(table_clock - store_clock, std::memory_order_relaxed);
  }

  // With `locations` of this batch, known rows are not searched, and all rows are known afterwards.
  // `scratch`: used by a pool of one thread; null: the call allocates its own.
  void pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations = nullptr,
            ShardScratch* scratch = nullptr) const;
  // pull() of every input key, without an intermediate row for each unique key.
  void pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations = nullptr) const;
  // Only finds the rows, in the calling thread, for callers that prepare a batch ahead of time.
  void locate(const SlotSlices& batch, RowLocations& locations) const;
  // Returns the number of the step, which is assigned once all arguments are checked and no snapshot is being
  // started. In a pool of one thread `stepped` counts the updated rows from the front of the batch: the
  // progress of a push that throws.
  std::uint64_t push(const SlotSlices& batch, std::span<const float> grads,
                     const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                     RowLocations* locations = nullptr, ShardScratch* scratch = nullptr);
  // push() of one gradient per input key: the gradients of each unique key are summed when its row is
  // updated, as by KeyBatch::sum.
  std::uint64_t push_per_key(const KeyBatch& batch, std::span<const float> grads,
                             const OccurrenceCounts& occurrences = {}, RowLocations* locations = nullptr);
  // Counts as one occurrence of each key.
  void assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock = 0);
  // Adds the number of rows of each slot to `by_slot`, unless it is empty.
  std::size_t erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot = {});
  void contains(const SlotSlices& batch, std::span<std::uint8_t> there) const;
  // Column k of the batch's rows as float32, dim per row (1 per row for the row state, k ==
  // rows().columns()).
  void state(const SlotSlices& batch, std::size_t column, std::span<float> values) const;
  // Whole rows: rows().floats() numbers each, the columns and then the row state.
  void pull_whole(const SlotSlices& batch, std::span<float> numbers, ShardScratch* scratch = nullptr) const;
  // Adds what steps in copies of rows have changed, like a push of gradients: creates missing rows; a row
  // stays if nothing in it changes, if a number would not be finite, or if state would be negative. Only for
  // rules that add up (optim/optimizer.h).
  std::uint64_t push_whole(const SlotSlices& batch, std::span<const float> changes,
                           const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                           ShardScratch* scratch = nullptr);
  // Column k of the batch's row metadata (policy/lifecycle.h) as stored; 0 for absent rows.
  void metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const;
  // Begins to fetch the rows of a later call that are not in memory, and locates the others. False: all rows
  // are always in memory.
  bool prefetch(const SlotSlices& batch, RowLocations* locations = nullptr) const;

  // --- by slot: checkpoints and iteration (as it was at one moment: shard/snapshot.h) ----------------------

  // The rows of one slot as a section (shard/section_codec.h). Returns their number.
  std::size_t section(Slot slot, std::vector<std::byte>& bytes) const;

  // Adds the rows of a section, which may come from any number of slots, to a table that has none of them.
  // Rows of slots outside [first, end), or not here, are skipped. Returns the number of added rows. Throws
  // std::invalid_argument, with nothing changed, for a wrong size or hashes that do not ascend; also for a
  // row that already exists, and then earlier slots are restored.
  std::size_t restore(std::size_t rows, std::span<const std::byte> section, std::size_t first = 0,
                      std::size_t end = kAllSlots);
  // Reserves rows by slot of `cut`, so that restore fills the table in one pass. Nothing with a source, which
  // takes them as they come.
  void reserve(Slots cut, std::span<const std::size_t> rows);

  // Two sums, modulo 2^64, over hashes of everything stored in the rows of one slot. Tables with equal sums
  // over all slots have equal rows with probability 1 - 2^-128; neither order nor number of slots matters. Of
  // rows in memory.
  std::array<std::uint64_t, 2> digest(Slot slot) const;

  // Hashes and weights of one slot in ascending order of hash.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const;
  // The same of its rows in memory; or in any order, without sorting them.
  void read_slot_in_memory(Slot slot, bool is_ordered, std::vector<std::uint64_t>& hashes,
                           std::vector<float>& weights) const;

  // Makes the copy of a child process usable there: it shares its pages with that of the parent until either
  // changes them. At the fork no call was under way, nor a save, and there was no source.
  void adopt_after_fork() noexcept {
    core_.owner = OwnerProcess();
    core_.changes.adopt();
    core_.budget.adopt();
  }

  // Blocks writers until they are resumed; called in pairs by one thread.
  void pause_writers();
  void resume_writers();
  class PausedWriters {
   public:
    explicit PausedWriters(Shard& shard) : shard_(shard) { shard_.pause_writers(); }
    ~PausedWriters() { shard_.resume_writers(); }
    PausedWriters(const PausedWriters&) = delete;
    PausedWriters& operator=(const PausedWriters&) = delete;

   private:
    Shard& shard_;
  };

  // --- lifecycle -------------------------------------------------------------------------------------------

  // Removes the rows of the slots [first, end) selected by the rules (shard/expiry.cc); an empty list means
  // the table's own rules. A dry run changes nothing, and reports what would be removed, and what would be at
  // other thresholds. The result is a list of words, which can be added element by element over ranges of
  // slots:
  //
  //   0           rows before
  //   1, 2        bytes before and after (a dry run: both before)
  //   3           impressions of all rows: decayed scores at the store's clock if rows keep them, else
  //               counts, in units of 2^-20; 0 if they keep neither
  //   4           waiting keys that were removed
  //   5 .. 37     occurrences of rows since the last sweep that was not a dry run, by the time since the
  //               row's previous occurrence: 0 clocks, 1, 2 to 3, 4 to 7, ...; all 0 if rows keep no clock
  //   38 + 2 k    rows removed by rule k and by no earlier rule; and their impressions
  //   then, in a dry run only, for every rule 64 pairs (rows, impressions), all rows in classes of the rule's
  //     quantity: an age or a count in classes as above; a score or norm x in class 32 + floor(log2(x)), from
  //     0 to 63
  //
  // Throws std::invalid_argument if a rule needs metadata that rows do not keep.
  static constexpr std::size_t kAges = ShardCounters::kAges;
  static constexpr std::size_t kSweepHead = 5 + kAges;
  static constexpr std::size_t kClasses = 64;
  std::vector<std::uint64_t> sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                   std::span<const Expiry> rules, bool dry_run);

  // filter() writes the state of a slot's admission filter for checkpoints; restore_filter() reads it, from
  // any number of slots (policy/admission.h).
  void filter(Slot slot, std::vector<std::byte>& bytes) const;
  // Slots outside [first, end), or not here, are not changed.
  void restore_filter(Slots cut, Slot slot, std::span<const std::byte> bytes, std::size_t first = 0,
                      std::size_t end = kAllSlots);

  // Estimated bytes of such a table with `rows` rows in total that were created by pushes. Does not depend on
  // the present contents.
  std::size_t bytes_at(std::size_t rows) const;

  std::size_t size() const;
  ShardStats stats() const;
  std::optional<TierStats> tier_stats() const;  // of the source
  // "" if all invariants hold, else the broken one and its slot.
  std::string verify() const;

 private:
  // Calls use(workspace, rows, first, ahead) for every run of rows, in order, and reads the first `touched`
  // bytes of each; an absent row is replaced by its initial row.
  template <class Use>
  void read(const SlotSlices& batch, RowLocations* locations, std::size_t touched, const Use& use,
            ShardScratch* scratch = nullptr) const;
  // Calls use(weights, first) for every run, with its weights in `to`, or in the workspace if `to` is null.
  template <class Use>
  void read_weights(const SlotSlices& batch, RowLocations* locations, float* to, const Use& use,
                    ShardScratch* scratch = nullptr) const;
  // (first, count, room): returns the gradients of a run's unique hashes, which may be computed in `room`.
  using Slopes = std::function<const float*(std::size_t, std::size_t, float*)>;
  // Of one change of a batch's rows.
  struct Change {
    std::uint64_t step = 0;
    std::uint64_t noise = 0;  // base/noise.h: step_noise
    std::uint32_t clock = 0;  // the table's
  };
  // A push by a call that may write: calls body(change, run) once, which calls run(use); use(work, rows,
  // first, ahead) changes a run of rows and returns the number of those that would not have been finite.
  template <class Body>
  std::uint64_t write_rows(const SlotSlices& batch, const OccurrenceCounts& occurrences, std::size_t* stepped,
                           const RowLocations* locations, ShardScratch* scratch, const Body& body);
  std::uint64_t step_rows(const SlotSlices& batch, const Slopes& slopes, const OccurrenceCounts& occurrences,
                          std::size_t* stepped, RowLocations* locations, ShardScratch* scratch);
  void check_push(const SlotSlices& batch, const OccurrenceCounts& occurrences, const std::size_t* stepped,
                  const RowLocations* locations) const;
  // The same for a UserRule (shard/user_step.cc).
  std::uint64_t step_user(const UserRule& rule, const SlotSlices& batch, const Slopes& slopes,
                          const OccurrenceCounts& occurrences, std::size_t* stepped, RowLocations* locations);
  // read() for writing: missing rows are created. The caller has entered the gate of writers.
  template <class Use>
  void change(const SlotSlices& batch, const InsertTerms& terms, const ShardCore::Known& known,
              const Use& use, ShardScratch* scratch = nullptr);

  ShardCore core_;
};

}  // namespace shoal
