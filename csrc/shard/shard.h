// Shard: a range of slots of one table, in one process, and the operations on their rows. Every request is a batch in hash
// order, each hash once, divided by slot (batch/key_batch.h). Results depend on the batch alone: not on threads, the number
// of slots, or which rows are in memory (shard/row_source.h).
//
// Invariants (verify() checks them): those of every SlotTable (I1 to I5), and of the source.
//
// Threads: any number of callers. Locks, in this order:
//   1. the turn         if there is a source: calls run one at a time
//   2. writers_mutex_   shared by calls that change rows; exclusive in pause_writers() and in pushes with a UserRule
//   3. budget lock      if there is a memory budget: calls that change tables run one at a time
//   4. slot locks       in ascending order, a few adjacent slots at a time (shard/probe_pipeline.h); readers share a slot
// Fork: a copy of a shard in a child process throws WrongProcessError.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/byte_stream.h"
#include "base/mix.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "batch/key_batch.h"
#include "optim/init.h"
#include "optim/optimizer.h"
#include "policy/admission.h"
#include "policy/budget.h"
#include "policy/lifecycle.h"
#include "shard/probe_pipeline.h"
#include "shard/row_locations.h"
#include "shard/row_source.h"
#include "shard/rows.h"
#include "shard/shard_stats.h"
#include "shard/tier_stats.h"
#include "table/slot_table.h"

namespace shoal {

struct WrongProcessError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The description of a table, identical on every server and in every manifest.
struct TableSpec {
  std::size_t dim;
  Dtype dtype;
  Optimizer optimizer;
  Init init;
  std::uint64_t seed;  // of the rounding noise
  Lifecycle lifecycle = {};
};

// The clock of a push and the number of occurrences of its keys (policy/lifecycle.h).
struct OccurrenceCounts {
  std::span<const std::uint32_t> counts = {};  // per hash, at least 1; empty: 1 each
  std::uint32_t clock = 0;                     // the store's
};

// A batch divided by the slots of a shard: hashes ascend strictly, its slot number s is [offsets[s], offsets[s + 1]).
struct SlotSlices {
  std::span<const std::uint64_t> hashes;
  std::span<const std::uint64_t> offsets;
};

// One lock per slot, or one lock for all slots, which is cheaper if calls are serialized anyway, as a data loop's are: calls of
// 1000 keys take 0.8 of the time and two thirds of the instructions (bench/table.md, "Wide rows").
enum class Locks : std::uint8_t { kBySlot, kOne };

// Memory for the intermediate values of a call, so that small batches allocate nothing. Any shards may use it, one call at a time.
class ShardScratch {
 private:
  friend class Shard;
  Buffer<std::byte> bytes_;
};

class Shard final {
 public:
  static constexpr std::size_t kAllSlots = std::numeric_limits<std::size_t>::max();  // as an end

  // Holds the slots [first, end). The pool and the budget must outlive the shard. Throws MemoryBudgetExceededError if not
  // even an empty table fits.
  Shard(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks = Locks::kBySlot,
        Budget* budget = nullptr, std::size_t first = 0, std::size_t end = kAllSlots);
  ~Shard();
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  // Rows come from this source, and go to it, from now on. Before the first call.
  void set_source(std::unique_ptr<RowSource> source) noexcept { source_ = std::move(source); }
  bool has_source() const noexcept { return source_ != nullptr; }
  // is_saving(): a save is in progress. fits_save(): whether `rows` rows can be changed within the memory for logged contents. With one lock for all
  // slots, changes do not wait for that; the save fails if much more has to be logged.
  bool is_saving() const noexcept { return saving_.active.load() && !saving_.lost.load(); }
  bool fits_save(std::size_t rows) const noexcept;
  bool has_snapshot() const noexcept { return saving_.active.load(); }
  // Releases the shard's part of the budget before the destructor runs, which may be much later. Call nothing else
  // after it.
  void leave_budget();

  const TableSpec& spec() const noexcept { return spec_; }
  const Slots& slots() const noexcept { return slots_; }  // of the whole table
  std::size_t first_slot() const noexcept { return first_; }
  std::size_t end_slot() const noexcept { return first_ + tables_.size(); }
  const Rows& rows() const noexcept { return rows_; }
  ThreadPool& pool() const noexcept { return pool_; }

  // Number of the last push; the first is 1.
  std::uint64_t step() const noexcept { return step_.load(std::memory_order_relaxed); }
  void set_step(std::uint64_t step) noexcept { step_.store(step, std::memory_order_relaxed); }

  // The learning rate of later pushes is that of the rule and its schedule times this. A checkpoint does not have it.
  double rate() const noexcept { return rate_.load(std::memory_order_relaxed); }
  void set_rate(double rate) noexcept { rate_.store(rate, std::memory_order_relaxed); }

  // Rows store the table's clock: the store's clock plus an offset, so that ages continue after a checkpoint is
  // loaded although the store's clock starts at 0.
  std::uint32_t table_clock(std::uint32_t store_clock) const noexcept {
    return store_clock + origin_.load(std::memory_order_relaxed);
  }
  void set_clock(std::uint32_t table_clock, std::uint32_t store_clock) noexcept {
    origin_.store(table_clock - store_clock, std::memory_order_relaxed);
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
  // started. In a pool of one thread `stepped` counts the updated rows from the front of the batch: the progress of a
  // push that throws.
  std::uint64_t push(const SlotSlices& batch, std::span<const float> grads,
                     const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                     RowLocations* locations = nullptr, ShardScratch* scratch = nullptr);
  // push() of one gradient per input key: the gradients of each unique key are summed when its row is updated, as by
  // KeyBatch::sum.
  std::uint64_t push_per_key(const KeyBatch& batch, std::span<const float> grads,
                             const OccurrenceCounts& occurrences = {}, RowLocations* locations = nullptr);
  // Counts as one occurrence of each key.
  void assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock = 0);
  // Adds the number of rows of each slot to `by_slot`, unless it is empty.
  std::size_t erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot = {});
  void contains(const SlotSlices& batch, std::span<std::uint8_t> there) const;
  // Column k of the batch's rows as float32, dim per row (1 per row for the row state, k == rows().columns()).
  void state(const SlotSlices& batch, std::size_t column, std::span<float> values) const;
  // Whole rows: rows().floats() numbers each, the columns and then the row state.
  void pull_whole(const SlotSlices& batch, std::span<float> numbers, ShardScratch* scratch = nullptr) const;
  // Adds what steps in copies of rows have changed, like a push of gradients: creates missing rows; a row stays if nothing in it
  // changes, if a number would not be finite, or if state would be negative. Only for rules that add up (optim/optimizer.h).
  std::uint64_t push_whole(const SlotSlices& batch, std::span<const float> changes,
                           const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                           ShardScratch* scratch = nullptr);
  // Column k of the batch's row metadata (policy/lifecycle.h) as stored; 0 for absent rows.
  void metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const;
  // Begins to fetch the rows of a later call that are not in memory, and locates the others. False: all rows are always in
  // memory.
  bool prefetch(const SlotSlices& batch, RowLocations* locations = nullptr) const;

  // Calls use(a, b) for ranges of slots, in order, which together are [first, end), until it returns false: all at once, or with
  // a source each slot in a turn of its own, with its rows in memory. `changes`: it may change them.
  void with_slots(std::size_t first, std::size_t end, bool changes,
                  const std::function<bool(std::size_t, std::size_t)>& use) const;

  // --- by slot: checkpoints and iteration (as it was at one moment: shard/snapshot.h) ----------------------------

  // The rows of one slot in ascending order of hash, as columns: hashes, then each column as stored, each aligned to
  // kSectionAlignment. Offsets are section_offsets(rows).
  std::size_t section(Slot slot, std::vector<std::byte>& bytes) const;  // returns the rows
  std::vector<std::size_t> section_offsets(
      std::size_t rows) const;  // rows().stored() + 2 numbers: the last is the size
  static constexpr std::size_t kSectionAlignment = 64;

  // Adds the rows of a section, which may come from any number of slots, to a table that has none of them. Rows of
  // slots outside [first, end), or not here, are skipped. Returns the number of added rows. Throws std::invalid_argument, with
  // nothing changed, for a wrong size or hashes that do not ascend; also for a row that already exists, and then
  // earlier slots are restored.
  std::size_t restore(std::size_t rows, std::span<const std::byte> section, std::size_t first = 0,
                      std::size_t end = kAllSlots);
  // Applies a delta to a base section, of any number of slots: the base's rows that lie in no range, and the delta's
  // rows, all of which must lie in one. Returns the number of rows. Throws std::invalid_argument otherwise. Does not
  // read the table.
  std::size_t merge(std::size_t base_rows, std::span<const std::byte> base, std::size_t delta_rows,
                    std::span<const std::byte> delta, const DirtyRanges& ranges,
                    std::vector<std::byte>& merged) const;
  // Reserves rows by slot of `cut`, so that restore fills the table in one pass. Nothing with a source, which takes them as they
  // come.
  void reserve(Slots cut, std::span<const std::size_t> rows);

  // Two sums, modulo 2^64, over hashes of everything stored in the rows of one slot. Tables with equal sums over all
  // slots have equal rows with probability 1 - 2^-128; neither order nor number of slots matters. Of rows in memory.
  std::array<std::uint64_t, 2> digest(Slot slot) const;

  // Hashes and weights of one slot in ascending order of hash.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const;
  // The same of its rows in memory; or in any order, without sorting them.
  void read_slot_in_memory(Slot slot, bool is_ordered, std::vector<std::uint64_t>& hashes,
                           std::vector<float>& weights) const;

  // Changes the weights of all rows in memory of the slots [first, end): change(weights) modifies the weights of some rows in
  // place. Weights that keep their bits keep their state; others are moved by the optimizer's move(), or set. Returns
  // the number of changed rows per slot. As in a push, a row that would not be finite is left unchanged and counted.
  // With a pool of one thread std::bad_alloc changes nothing: all memory is allocated first.
  std::vector<std::size_t> transform_weights(std::size_t first, std::size_t end,
                                             const std::function<void(std::span<float>)>& change);

  // A function of the program over the rows in memory of the slots [first, end), which `writes` lets change them: shard/user_function.h.
  std::vector<double> run_user_function(bool writes, std::span<const double> parameters, std::size_t first,
                                        std::size_t end);

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

  // Name of the save or export that the next delta can be based on; "" if there is none.
  std::string base(Purpose purpose = Purpose::kSave) const;
  // Records changes from now on, as if the rows had just been saved as `base`. Requires exclusive use of the shard.
  void track(std::string base);

  // What a save of a base or a delta does to the recorded changes, where it was executed elsewhere: the rows of the moment are
  // being saved; they are saved under this name; or the save has failed. Like a save, not during another one.
  void begin_base();
  void end_base(std::optional<std::string> name);
  // The base is unknown: the next save has to be one of all rows.
  void forget_base();

  // --- whole state: shard/state_bytes.cc -------------------------------------------------------------------------

  // What a ShardCopy has made of everything that later calls depend on, with the counters of changes and the capacities on which
  // decisions under a budget depend. Into a new shard of the same description: first the table, then each slot.
  // std::invalid_argument, and MemoryBudgetExceededError, leave the shard unusable.
  void restore_state(ByteReader& in);
  void restore_state(Slot slot, ByteReader& in);

  // --- lifecycle ------------------------------------------------------------------------------------------------

  // Removes the rows of the slots [first, end) selected by the rules (shard/expiry.cc); an empty list means the
  // table's own rules. A dry run changes nothing, and reports what would be removed, and what would be at other
  // thresholds. The result is a list of words, which can be added element by element over ranges of slots:
  //
  //   0           rows before
  //   1, 2        bytes before and after (a dry run: both before)
  //   3           impressions of all rows: decayed scores at the store's clock if rows keep them, else counts, in units of
  //               2^-20; 0 if they keep neither
  //   4           waiting keys that were removed
  //   5 .. 37     occurrences of rows since the last sweep that was not a dry run, by the time since the row's previous
  //               occurrence: 0 clocks, 1, 2 to 3, 4 to 7, ...; all 0 if rows keep no clock
  //   38 + 2 k    rows removed by rule k and by no earlier rule; and their impressions
  //   then, in a dry run only, for every rule 64 pairs (rows, impressions), all rows in classes of the rule's quantity:
  //     an age or a count in classes as above; a score or norm x in class 32 + floor(log2(x)), from 0 to 63
  //
  // Throws std::invalid_argument if a rule needs metadata that rows do not keep.
  static constexpr std::size_t kAges = 33;
  static constexpr std::size_t kSweepHead = 5 + kAges;
  static constexpr std::size_t kClasses = 64;
  std::vector<std::uint64_t> sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                   std::span<const Expiry> rules, bool dry_run);

  // filter() writes the state of a slot's admission filter for checkpoints; restore_filter() reads it, from any
  // number of slots (policy/admission.h).
  void filter(Slot slot, std::vector<std::byte>& bytes) const;
  // Slots outside [first, end), or not here, are not changed.
  void restore_filter(Slots cut, Slot slot, std::span<const std::byte> bytes, std::size_t first = 0,
                      std::size_t end = kAllSlots);

  // Estimated bytes of such a table with `rows` rows in total that were created by pushes, including the sections of
  // a checkpoint. Does not depend on the present contents.
  std::size_t bytes_at(std::size_t rows) const;
  std::size_t saved_bytes_at(std::size_t rows) const;

  std::size_t size() const;
  ShardStats stats() const;
  std::optional<TierStats> tier_stats() const;  // of the source
  // "" if all invariants hold, else the broken one and its slot.
  std::string verify() const;

 private:
  struct Workspace;  // buffers of one part of a batch
  // The memory of a workspace: null if several threads would share it.
  Buffer<std::byte>* room_of(ShardScratch* scratch) const noexcept {
    return scratch != nullptr && pool_.threads() == 1 ? &scratch->bytes_ : nullptr;
  }

  void check_batch(const SlotSlices& batch) const;
  void check_process() const;
  void check_slots(std::size_t first, std::size_t end) const;
  // The state of a slot, which must be here.
  SlotState& at(Slot slot) const;

  // --- with a source ----------------------------------------------------------------------------------------------
  using Turn = std::unique_lock<RowSource>;  // without a source: empty
  Turn turn() const;
  // A turn with the rows of a batch in memory. With a source all are known in `locations` then, which are its own if there are
  // none.
  Turn bring(const SlotSlices& batch, RowLocations*& locations, RowSource::Use use) const {
    Turn turn;
    if (source_ != nullptr) [[unlikely]] {
      turn = this->turn();
      locations = &source_->bring(batch, locations, use);
    }
    return turn;
  }
  std::size_t rows_elsewhere(std::size_t place) const noexcept {
    return source_ == nullptr ? 0 : source_->rows_elsewhere(place);
  }
  struct RowBytes {
    std::size_t rows;
    std::size_t bytes;
  };
  // Of all rows. The caller has paused the writers.
  RowBytes rows_and_bytes() const;

  // Number of a hash's slot among those here; tables_, noted_ and the offsets of batches are indexed by it.
  std::size_t slot_position(std::uint64_t hash) const noexcept { return index_of(slots_.of(hash)) - first_; }
  // Calls work(first, end) in the pool's threads for ranges of slots that together cover the batch.
  template <class Work>
  void split(const SlotSlices& batch, const Work& work) const;
  // Known row locations, and where to record those that are found; null: none.
  struct Known {
    const RowLocations* before = nullptr;
    RowLocations* after = nullptr;
  };
  Known known(const SlotSlices& batch, RowLocations* locations) const;
  // Records in `locations`, which known() has prepared, the rows of the slots with places from `first` to `end`.
  template <class Lock>
  void find(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end) const;
  // Runs a ProbePipeline with its own worker in each thread. Lock is that of a slot.
  template <class Lock, class MakeWorker>
  void walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const;
  // Calls use(workspace, rows, first, ahead) for every run of rows, in order, and reads the first `touched` bytes of
  // each; an absent row is replaced by its initial row.
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
  // A push: calls body(change, run) once, which calls run(use); use(work, rows, first, ahead) changes a run of rows and returns the
  // number of those that would not have been finite.
  template <class Body>
  std::uint64_t write_rows(const SlotSlices& batch, const OccurrenceCounts& occurrences, std::size_t* stepped,
                           RowLocations* locations, ShardScratch* scratch, const Body& body);
  std::uint64_t step_rows(const SlotSlices& batch, const Slopes& slopes, const OccurrenceCounts& occurrences,
                          std::size_t* stepped, RowLocations* locations, ShardScratch* scratch);
  void check_push(const SlotSlices& batch, const OccurrenceCounts& occurrences, const std::size_t* stepped,
                  const RowLocations* locations) const;
  void add_changes(const Block& block, const float* changes, std::uint32_t* finite) const noexcept;
  // The same for a UserRule (shard/user_step.cc).
  std::uint64_t step_user(const UserRule& rule, const SlotSlices& batch, const Slopes& slopes,
                          const OccurrenceCounts& occurrences, std::size_t* stepped, RowLocations* locations);
  // The parameters and state of a worker that creates rows.
  struct InsertContext {
    const SlotTable* counted = nullptr;  // the last table whose missing rows were counted
    std::vector<std::byte*> rows = {};   // scratch
    PushTime now = {};
    bool asks = false;                           // whether a key must be admitted
    std::span<const std::uint32_t> counts = {};  // occurrences of the batch's keys; empty: 1 each
    std::uint64_t refused = 0;                   // occurrences
    const SlotState* at = nullptr;  // the last slot where keys were asked about, and how many of them
    std::size_t asked = 0;
    std::size_t admitted = 0;
  };
  // The same for writing: missing rows are created. The caller holds writers_mutex_.
  template <class Use>
  void change(const SlotSlices& batch, const InsertContext& how, const Known& known, const Use& use,
              ShardScratch* scratch = nullptr);
  // What a call holds that changes the rows of a batch, in the order of the locks.
  struct Writing {
    Turn turn;
    std::shared_lock<std::shared_mutex> writers;
    std::unique_lock<std::mutex> budget;
  };
  Writing begin_writing(const SlotSlices& batch, RowLocations*& locations, RowSource::Use use) const;
  std::shared_lock<std::shared_mutex> enter() const;
  // Excludes other writers, and snapshots.
  std::unique_lock<std::shared_mutex> enter_alone() const;

  void fill_initial_row(std::uint64_t hash, std::byte* row) const noexcept;
  // Records occurrences in the metadata of the rows.
  void see(std::span<std::byte* const> rows, std::span<const std::uint32_t> counts,
           std::uint32_t now) noexcept;
  // Reads the weights of rows whose slot is locked: dim floats each.
  void weights_of(std::span<std::byte* const> rows, float* weights) const;
  class ExpiryEvaluator;  // applies expiry rules to rows

  friend class ShardResidency;  // rows that a tier brings and takes away

  // --- for a copy: shard/state_bytes.cc
  friend class ShardCopy;
  // The bytes of a slot before and after its rows and its filter.
  struct SlotHead {
    std::vector<std::byte> bytes;
    std::vector<std::byte> ranges;
  };
  void save_state(ByteWriter& out) const;
  SlotHead head_of(const SlotState& state) const;
  void write_rows(std::span<const SlotTable::Entry> entries, ByteWriter& out) const;
  void restore_slot(Slot slot, ByteReader& in);

  // --- for a save: shard/snapshot.cc
  friend class Snapshot;
  // Shared state of a save in progress and of the threads that change rows.
  struct Saving {
    std::atomic<bool> active{false};
    std::atomic<bool> lost{false};     // memory for logging ran out: the save fails
    std::atomic<std::size_t> left{0};  // slots not yet saved
    std::atomic<std::size_t> kept{0};  // bytes logged
    std::atomic<std::size_t> most{0};  // limit of `kept` at which changes wait
    Mutex mutex;                       // the last in the lock order
    CondVar slot_saved;                // signals that a slot was saved or the save ended
    std::array<std::string, kPurposes> bases GUARDED_BY(mutex);
  };
  // Logs the previous contents of the rows of these hashes, each once, and of their admission state. The slot is
  // locked.
  void before_change(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept {
    if (slot.watched) [[unlikely]] {
      keep(slot, hashes);
    }
  }
  // One for each slot.
  std::vector<std::unique_ptr<DirtyRanges>> new_ranges() const;
  void begin_base(Purpose purpose, std::vector<std::unique_ptr<DirtyRanges>> ranges) noexcept;
  static void end_base(SlotState& slot, Purpose purpose, bool is_base) noexcept;
  void before_change_of_all(SlotState& slot) noexcept;
  void keep(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept;
  // Waits until `rows` rows may be changed during a save. The caller holds no slot lock and has no turn.
  void wait_for_save(std::size_t rows) const {
    if (saving_.active.load(std::memory_order_relaxed)) [[unlikely]] {
      wait_for_slots(rows);
    }
  }
  // The same for a slot within with_slots(), which with a source has waited before the turn.
  void wait_for_save_of_slot(std::size_t rows) const {
    if (source_ == nullptr) {
      wait_for_save(rows);
    }
  }
  void wait_for_slots(std::size_t rows) const;
  std::vector<std::uint64_t> hashes_of(std::size_t rows, std::span<const std::byte> section) const;
  std::size_t write_section(std::span<const SlotTable::Entry> entries, std::vector<std::byte>& bytes) const;
  void read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                    std::vector<float>& weights) const;

  // --- under a budget: shard/expiry.cc
  std::unique_lock<std::mutex> lock_budget() const;  // empty if there is no budget
  std::size_t bytes_of(const SlotState& slot) const noexcept;
  // Bytes that this table may use in a slot, given by its place; likewise below.
  std::size_t allowed(std::size_t place) const noexcept;
  // Records the present bytes of a slot in the budget.
  void note(std::size_t place) noexcept;
  // Makes room for all rows and waiting keys that the batch may need, evicting others if necessary. Throws
  // MemoryBudgetExceededError, with nothing changed, if they do not fit.
  void fit(const SlotSlices& batch, const InsertContext& how);
  [[noreturn]] void throw_over_budget(std::size_t place, std::size_t rows) const;

  // Evicts the `count` lowest-ranked rows of a slot by the first rule of `evaluator`, but none of those in `spared`,
  // which ascend. Returns the number of evicted rows; std::bad_alloc changes nothing.
  std::size_t evict(SlotState& slot, const ExpiryEvaluator& evaluator, std::size_t count,
                    std::span<const std::uint64_t> spared);
  // Evicts rows of the batch's slots that have more than an expiry rule allows.
  void enforce_max_rows(const SlotSlices& batch, std::uint32_t now);
  // A slot where more than one row in kFewMissing is missing is filling: in the next batch its missing rows are
  // created before the probe, because inserting moves rows, and every run already probed would have to be probed
  // again.
  static constexpr std::size_t kFewMissing = 16;

  // Inserts the missing rows of a run that begins at `first`. Returns their number.
  std::size_t create(Probe& run, const SlotSlices& batch, std::size_t first, InsertContext& context) const;
  // Inserts the missing rows of all hashes of a slot in the batch.
  std::size_t create_all(SlotState& slot, std::span<const std::uint64_t> hashes,
                         InsertContext& context) const;
  std::size_t insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                             std::span<std::byte*> rows, std::uint32_t now) const;
  // Asks the slot's admission filter about the missing rows among `rows`, which belong to the batch's hashes from
  // number `first` on, all of that slot, and inserts the admitted ones. Returns their number.
  std::size_t admit(SlotState& slot, const SlotSlices& batch, std::span<std::byte*> rows, std::size_t first,
                    InsertContext& context) const;
  // Makes room for `missing` rows and for the missing ones among the slot's hashes from `next` on. If ascending
  // hashes were inserted into a table that grows in small steps, they would all collide at its front. Counted once
  // per batch.
  void make_room(SlotTable& table, std::size_t missing, const SlotSlices& batch, std::size_t next,
                 InsertContext& context) const;

  TableSpec spec_;
  Slots slots_;
  std::size_t first_;
  ThreadPool& pool_;
  Rows rows_;
  Layout layout_;
  Chunks chunks_;
  AdmissionConfig admission_;
  std::uint64_t number_;                            // unique in the process
  std::size_t stamp_;                               // of the process that may use this shard
  mutable std::vector<std::byte> initial_row_;      // if equal for every key, else empty
  std::unique_ptr<std::shared_mutex> of_all_;       // the lock of all slots (Locks::kOne), else null
  std::vector<std::unique_ptr<SlotState>> tables_;  // one per slot here
  Budget* budget_;
  std::vector<std::size_t> noted_;  // bytes of each slot recorded in the budget
  // Held by who waits for the next lock alone, so that new writers do not starve it.
  mutable Mutex pause_mutex_;
  mutable std::shared_mutex writers_mutex_;
  std::shared_ptr<Buffer<std::byte>> user_rows_;  // of steps of a UserRule; arrays over it may outlive them
  Layout numbers_;                                // of a PreImageLog
  mutable Saving saving_;
  std::atomic<std::uint64_t> step_{0};
  std::atomic<double> rate_{1};
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
  std::unique_ptr<RowSource> source_;  // last: it uses the tables; null: all rows are in memory
};

}  // namespace shoal
