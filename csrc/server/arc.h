// Arc: a contiguous range of slots of every table, with all state that is needed to serve it: a deterministic state
// machine with exactly-once writes and, under BSP, one step a clock with the merge of all pushes (push(), sweep() and
// step() say when they act). Two arcs with equal state that execute the same operations stay equal, bit by bit. The
// caller (server/service.h) decides before whether an operation is accepted. It knows no peers, replies, sockets, key
// lists or encodings.
//
// Several jobs may be served at once (server/job_state.h), each with its own clocks. A table may be used by several:
// then their operations and steps act on its rows in the order in which the arc executes them, each as a whole.
//
// Invariants
//   I1  There is a default job, and the numbers of the jobs differ.
//   I2  An operation that throws leaves windows and clocks unchanged, so that it is executed when it is repeated. A
//       push, or the step of a clock, that ran out of memory continues where it stopped. An operation that was
//       executed is not executed again.
//   I3  Budget decisions depend on the slots alone: a slot's share is the arc's, wherever it goes.
//
// Threads: none of its own; one owner. Threads of saves and loads use the shards, which they share.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/merge.h"
#include "policy/budget.h"
#include "server/clocks.h"
#include "server/dedup_window.h"
#include "server/disposal.h"
#include "server/job_state.h"
#include "server/pending_pushes.h"
#include "server/slot_range.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "tier/tier_space.h"
#include "transport/buffer_pool.h"

namespace shoal {

// A worker: a rank of a job.
struct WorkerId {
  std::uint32_t job = 0;
  std::uint32_t rank = 0;

  bool operator==(const WorkerId&) const = default;
};

// The last tick of a worker: its clock, and the tables that it named (under BSP).
struct LastTick {
  std::uint32_t clock = 0;
  std::vector<std::uint32_t> tables{};
};

// What the arcs of a Service share: a thread and memory. Nothing in it outlasts an operation.
struct ArcWorkspace {
  ThreadPool pool{1};
  BufferPool buffers;
  Buffer<std::uint64_t> some_hashes;  // the rest of a call that was executed in part
  Buffer<float> some_values;
  Buffer<std::uint32_t> some_counts;
  Buffer<std::uint32_t> ones;  // the counts of pushes without counts, to merge them with others
  MergeScratch merge;
  ShardScratch shard;
};

class Arc {
 public:
  struct Table {
    std::shared_ptr<Shard> shard;    // shared: a save may outlive the table
    std::shared_ptr<Shard> loading;  // replaces `shard` when the load ends
    WorkerId loader{};               // the worker that loads
    // A save of a base or a delta that another endpoint executes.
    struct Save {
      WorkerId worker{};
      std::uint64_t sequence = 0;
      bool is_followed = false;  // false: a save of this shard had not closed
    };
    std::optional<Save> save;
    std::string full;  // why a BSP step was not made: no memory, or a failed optimizer; until one is
    std::uint32_t reached =
        0;  // the greatest clock of the table that a named job which has ended has reached
  };
  // Who writes, and where.
  struct Write {
    WorkerId worker{};
    std::uint64_t sequence = 0;
    std::uint32_t table = 0;
    std::uint32_t clock = 0;
  };
  // Rows of the arc's slots, in order of their hashes, each once.
  struct Rows {
    std::span<const std::uint64_t> hashes;
    std::span<const float> values;          // dim each: gradients or weights
    std::span<const std::uint32_t> counts;  // of a push; empty: all are 1
    bool is_whole = false;                  // changes of whole rows (shard/shard.h) in place of gradients
  };
  // The rows of a write, and how many of them are in slots that have executed it.
  struct Fresh {
    SlotSlices slices;
    std::size_t done = 0;
    const DedupWindow::PartialPush* partial = nullptr;
    bool any = false;  // whether something is left to do

    std::size_t rows() const noexcept { return slices.hashes.size() - done; }
  };

  // Owns the slots [first, end). The workspace must outlive the arc, or its next move; the disposal must not.
  Arc(Slots slots, std::size_t first, std::size_t end, ArcWorkspace& workspace, Disposal& disposal);
  Arc(const Arc&) = delete;
  Arc& operator=(const Arc&) = delete;

  // Another Service takes it over: from now on it uses this workspace and disposal. Nothing else refers to the former owner: rows,
  // budgets and waiting pushes have memory of their own.
  void move_to(ArcWorkspace& workspace, Disposal& disposal) noexcept {
    workspace_ = &workspace;
    disposal_ = &disposal;
  }

  const Slots& slots() const noexcept { return slots_; }  // of the whole table
  std::size_t first_slot() const noexcept { return first_; }
  std::size_t end_slot() const noexcept { return end_; }
  // The default job comes first, the others follow in the order in which they began.
  const std::vector<std::unique_ptr<JobState>>& jobs() const noexcept { return jobs_; }
  // Of this number; null: there is none. kDefaultJob means the default job.
  const JobState* find_job(std::uint32_t number) const noexcept { return state_of(number); }
  // Of the last record that it has executed (server/replication_log.h), while no replica counts them; not part of its state.
  std::uint64_t stamp() const noexcept { return stamp_; }
  void set_stamp(std::uint64_t stamp) noexcept { stamp_ = stamp; }
  const std::map<std::uint32_t, Table>& tables() const noexcept { return tables_; }
  // Bytes per slot; nullopt: no budget.
  std::optional<std::uint64_t> slot_bytes() const noexcept;
  Table* find(std::uint32_t id) noexcept;
  const Table* find(std::uint32_t id) const noexcept;
  // What Shard calls the store's clock, for an operation of a job at its clock. A job that is not known counts as the default job.
  std::uint32_t store_clock(std::uint32_t job, std::uint32_t table, std::uint32_t clock) const noexcept {
    return jobs_.size() == 1 ? clock : named_store_clock(job, table, clock);
  }
  // Divides hashes of these slots by slot. Valid until the next cut() or fresh().
  SlotSlices cut(std::span<const std::uint64_t> hashes);

  // --- copies: arc_copy.h -------------------------------------------------------------------------------------------

  // The whole state, in the pieces of an ArcCopy. std::invalid_argument: a table is being saved, copied or loaded.
  std::vector<std::vector<std::byte>> save() const;

  // --- orders: arc_control.cc ---------------------------------------------------------------------------------------

  // Starts a job without admitted workers, at clock 0. Tables stay. The default job replaces the last one, whose pending work is
  // dropped, and the tables' clocks continue from the clock `before` that it reached. A named job begins in addition to the others.
  void start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before,
                 bool is_named = false);
  // Ends a named job: pending work is dropped.
  void end_job(std::uint32_t job);
  // std::invalid_argument if the worker would miss applied clocks, or there is no such job.
  void check_admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock) const;
  // Whether it has admitted the worker, or an earlier incarnation.
  bool serves(const WorkerId& worker, std::uint32_t incarnation) const noexcept;
  // Whether an admission replaces an admitted worker.
  bool replaces(const WorkerId& worker, std::uint32_t incarnation) const noexcept;
  // These two return the number of dropped pushes, of clocks that the worker has not ticked. In a job that is not known fence() and
  // dismiss() have no effect, and neither have hold() and resume().
  std::size_t admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock);
  std::size_t dismiss(const WorkerId& worker, std::uint32_t incarnation, const LastTick& last);
  LastTick fence(const WorkerId& worker, std::uint32_t incarnation);
  std::uint32_t hold(std::uint32_t job);
  void resume(std::uint32_t job);
  // Bytes per slot; before the first table is added.
  void set_memory(std::uint64_t slot_bytes);
  // Where the tables have their other rows that do not fit in memory, except under a budget, or with a MaxRows rule; before the first
  // table is added. Null: all rows are in memory.
  void set_tier(std::shared_ptr<TierSpace> tier) { context_->tier = std::move(tier); }
  // An empty shard of these slots, for add_table() or load_begin(). MemoryBudgetExceededError, TierStorageError.
  std::shared_ptr<Shard> make_shard(const TableSpec& spec);
  void add_table(std::uint32_t id, std::shared_ptr<Shard> shard);
  void drop_table(std::uint32_t id);

  // --- writes: arc_write.cc -----------------------------------------------------------------------------------------

  // Whether a call of the worker has been executed here, in any slot; or in this one.
  bool has_done(const WorkerId& worker, std::uint64_t sequence) const noexcept;
  bool has_done(const WorkerId& worker, std::uint64_t sequence, std::size_t slot) const noexcept;
  // What is left of a write; valid until the next cut() or fresh(). Changes nothing.
  Fresh fresh(const Write& write, std::span<const std::uint64_t> hashes);
  // `owner` keeps the memory of the rows; null: they are copied if they are kept.
  void push(const Write& write, const Rows& rows, const Fresh& fresh, std::shared_ptr<const void> owner);
  void assign(const Write& write, const Rows& rows, const Fresh& fresh);
  void erase(const Write& write, const Fresh& fresh);
  // Rows that the call erased in the slots of these hashes, however often it came.
  std::uint64_t erased(const WorkerId& worker, std::uint64_t sequence,
                       std::span<const std::uint64_t> hashes) const noexcept;
  // A function that changes rows of the slots [first, end): its results, also if it is repeated.
  const std::vector<double>& change(const Write& write, Function function, std::span<const double> parameters,
                                    std::size_t first, std::size_t end);
  // As Shard::sweep, also if it is repeated.
  const std::vector<std::uint64_t>& sweep(const Write& write, std::span<const Expiry> rules);
  void load_begin(const Write& write, std::shared_ptr<Shard> shard);
  // Adds those of the rows that lie in these slots.
  void load_rows(const Write& write, std::size_t rows, std::span<const std::byte> section);
  void load_filter(const Write& write, Slots cut, Slot slot, std::span<const std::byte> filter);
  // `step`: the table's step; its clock; the name of the base of the next delta.
  void load_end(const Write& write, std::uint64_t step, std::uint32_t table_clock, const std::string& base);
  void drop_loading(std::uint32_t table);
  // A save that another endpoint executes, of a base or a delta of this table; and the end of all saves, of those of a job's workers, of
  // one of them, or of the one that began with call `sequence`: its name, if it was written.
  void begin_save(const Write& write);
  void end_saves(std::optional<std::uint32_t> job = {}, std::optional<std::uint32_t> rank = {},
                 std::optional<std::uint64_t> sequence = {}, const std::optional<std::string>& name = {});
  // A call without effect on rows was executed.
  void mark(const Write& write) { history(write.worker).calls().mark(write.sequence); }

  // --- clocks: arc_step.cc ------------------------------------------------------------------------------------------

  // Ends a clock of a worker, who pushed to these tables in it.
  void tick(const WorkerId& worker, std::span<const std::uint32_t> tables);
  // Applies the next clock of the n-th job that has ended and is not applied. If it throws, it stays pending.
  void step(std::size_t n) { step(*jobs_[n]); }

 private:
  friend class ArcCopy;
  friend class ArcRestorer;
  Arc(Slots slots, std::size_t first, std::size_t end);

  JobState* state_of(std::uint32_t number) const noexcept {
    const auto& first = jobs_.front();  // of most requests
    return number == kDefaultJob || number == first->number ? first.get() : find_named(number);
  }
  JobState* find_named(std::uint32_t number) const noexcept;
  std::uint32_t named_store_clock(std::uint32_t job, std::uint32_t table, std::uint32_t clock) const noexcept;
  // The caller has checked that it is known.
  JobState& job(std::uint32_t number);
  DedupWindow& history(const WorkerId& worker);
  DedupWindow* find_history(const WorkerId& worker) const noexcept;
  Table& table(std::uint32_t id);
  std::size_t forget(JobState& job, std::uint32_t rank);
  // What a job that ends, or is replaced, has begun.
  void drop_loads(std::uint32_t job);
  // The greatest clock of a table that the named jobs have reached.
  std::uint32_t reached(std::uint32_t id, const Table& table) const noexcept;
  void tick(JobState& job, std::uint32_t rank, std::span<const std::uint32_t> tables);
  void step(JobState& job);
  // The rows that are left to do, copied to the workspace if others lie between them.
  Rows rest(const Fresh& fresh, const Rows& rows, std::size_t dim, std::uint64_t sequence, DedupWindow& dedup,
            SlotSlices& slices);
  // Calls use(slot, begin, end) for the slots that have hashes.
  template <class Use>
  void each_slot(const SlotSlices& slices, const Use& use) const;
  void mark(const SlotSlices& slices, std::uint64_t sequence, DedupWindow& dedup) const noexcept;
  void step_rows(const Write& write, Table& table, const SlotSlices& slices, const Rows& rows,
                 DedupWindow& dedup);
  void step_table(JobState& job, std::uint32_t id, Table& table);

  // What the shards refer to. They keep it: a save may outlive the arc.
  struct ShardContext {
    ThreadPool pool{1};
    std::optional<Budget> budget;
    std::shared_ptr<TierSpace> tier;
  };

  const Slots slots_;
  const std::size_t first_;
  const std::size_t end_;
  ArcWorkspace* workspace_ = nullptr;
  Disposal* disposal_ = nullptr;
  std::shared_ptr<ShardContext> context_ = std::make_shared<ShardContext>();

  std::uint64_t stamp_ = 0;
  std::vector<std::unique_ptr<JobState>> jobs_;
  std::map<std::uint32_t, Table> tables_;
  std::vector<std::uint64_t> offsets_;  // one more than slots: scratch
};

}  // namespace shoal
