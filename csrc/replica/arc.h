// Arc: a contiguous range of slots of every table, with all state that is needed to serve it: a deterministic
// state machine with exactly-once writes and, under BSP, one step a clock with the merge of all pushes. Two
// arcs with equal state that execute the same operations stay equal, bit by bit. The caller
// (endpoint/service.h) decides before whether an operation is accepted. It knows no peers or encodings.
// Operations and steps of several jobs act on a table in the order in which the arc executes them.
//
// Invariants
//   I1  An operation that throws leaves windows and clocks unchanged, so that it is executed when it is
//       repeated. A push, or the step of a clock, that ran out of memory continues where it stopped. An
//       operation that was executed is not executed again.
//   I2  Budget decisions depend on the slots alone: a slot's share is the arc's, wherever it goes.
//
// Threads: none of its own; one owner. Threads of saves and loads use the shards, which they share.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/merge.h"
#include "policy/budget.h"
#include "replica/arc_op.h"
#include "replica/clocks.h"
#include "replica/dedup_window.h"
#include "replica/disposal.h"
#include "replica/jobs.h"
#include "replica/pending_pushes.h"
#include "replica/slot_range.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "tier/tier_space.h"
#include "transport/buffer_pool.h"
#include "wire/wire.h"

namespace shoal {

// What the arcs of an owner share: a thread and memory. Nothing in it outlasts an operation.
struct ArcWorkspace {
  ThreadPool pool{1};
  BufferPool buffers;
  Buffer<std::uint64_t> hashes_left;  // the rest of a call that was executed in part
  Buffer<float> values_left;
  Buffer<std::uint32_t> counts_left;
  Buffer<std::uint32_t> ones;  // the counts of pushes without counts, to merge them with others
  MergeScratch merge;
  ShardScratch shard;
};

// Why a BSP step was not made: no memory, or an optimizer or a disk that failed. No request waits for a step:
// the next ones to the table report it.
struct StepFailure {
  wire::Status status = wire::Status::kResourceExhausted;
  std::string text{};
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
    std::optional<StepFailure> failed_step;  // of BSP, until one is made
    std::uint32_t reached =
        0;  // the greatest clock of the table that a named job which has ended has reached
  };
  // Owns the slots [first, end). The workspace must outlive the arc, or its next move; the disposal must not.
  Arc(Slots slots, std::size_t first, std::size_t end, ArcWorkspace& workspace, Disposal& disposal);
  Arc(const Arc&) = delete;
  Arc& operator=(const Arc&) = delete;

  // Another owner takes it over: from now on it uses this workspace and disposal. Nothing else refers to the
  // former owner: rows, budgets and waiting pushes have memory of their own.
  void move_to(ArcWorkspace& workspace, Disposal& disposal) noexcept {
    workspace_ = &workspace;
    disposal_ = &disposal;
  }

  const Slots& slots() const noexcept { return slots_; }  // of the whole table
  std::size_t first_slot() const noexcept { return first_; }
  std::size_t end_slot() const noexcept { return end_; }
  SlotRange range() const noexcept { return {first_, end_}; }
  const Jobs& jobs() const noexcept { return jobs_; }
  // Of the last record that it has executed (replica/replication_log.h), while no replica counts them; not
  // part of its state.
  std::uint64_t stamp() const noexcept { return stamp_; }
  void set_stamp(std::uint64_t stamp) noexcept { stamp_ = stamp; }
  const std::map<std::uint32_t, Table>& tables() const noexcept { return tables_; }
  // Bytes per slot; nullopt: no budget.
  std::optional<std::uint64_t> slot_bytes() const noexcept;
  Table* find(std::uint32_t id) noexcept;
  const Table* find(std::uint32_t id) const noexcept;
  // What Shard calls the store's clock, for an operation of a job at its clock. A job that is not known
  // counts as the default job.
  std::uint32_t store_clock(std::uint32_t job, std::uint32_t table, std::uint32_t clock) const noexcept {
    return jobs_.all().size() == 1 ? clock : named_store_clock(job, table, clock);
  }
  // Divides hashes of these slots by slot. Valid until the next cut() or remainder().
  SlotSlices cut(std::span<const std::uint64_t> hashes);

  // --- copies: arc_copy.h ---------------------------------------------------------------------------------

  // The whole state, in the pieces of an ArcCopy. std::invalid_argument: a table is being saved, copied or
  // loaded.
  std::vector<std::vector<std::byte>> save() const;

  // Executes an operation. What it does depends on the state and the operation alone. If it throws, windows
  // and clocks are unchanged (I1).
  ArcResult apply(const ArcOp& op) {
    return std::visit([this](const auto& operation) { return execute(operation); }, op);
  }

  // Where the tables have their other rows that do not fit in memory, except under a budget, or with a
  // MaxRows rule; before the first table is added. Null: all rows are in memory.
  void set_tier(std::shared_ptr<TierSpace> tier) { context_->tier = std::move(tier); }
  // Makes empty shards of these slots, for AddShardOp or LoadBeginOp, by any thread, also if the arc has
  // ended meanwhile. They throw MemoryBudgetExceededError and TierStorageError.
  std::function<std::shared_ptr<Shard>(const TableSpec&)> shard_maker() const;

  // What is left of a write; valid until the next cut() or remainder().
  Remainder remainder(const WriteId& write, std::span<const std::uint64_t> hashes);
  // Rows that the call erased in the slots of these hashes, however often it came.
  std::uint64_t erased(const WorkerId& worker, std::uint64_t sequence,
                       std::span<const std::uint64_t> hashes) const noexcept;

 private:
  friend class ArcCopy;
  friend class ArcRestorer;
  Arc(Slots slots, std::size_t first, std::size_t end);

  std::uint32_t named_store_clock(std::uint32_t job, std::uint32_t table, std::uint32_t clock) const noexcept;
  Table& table(std::uint32_t id);

  // arc_write.cc
  ArcResult execute(const PushOp& op);
  ArcResult execute(const AssignOp& op);
  ArcResult execute(const EraseOp& op);
  ArcResult execute(const ChangeOp& op);
  ArcResult execute(const SweepOp& op);
  ArcResult execute(const BeginSaveOp& op);
  ArcResult execute(const EndSavesOp& op);
  ArcResult execute(const LoadBeginOp& op);
  ArcResult execute(const LoadRowsOp& op);
  ArcResult execute(const LoadFilterOp& op);
  ArcResult execute(const LoadEndOp& op);
  ArcResult execute(const DropLoadOp& op);
  ArcResult execute(const MarkOp& op);
  // arc_step.cc
  ArcResult execute(const TickOp& op);
  ArcResult execute(const StepOp& op);
  // arc_control.cc
  ArcResult execute(const StartJob& order);
  ArcResult execute(const EndJob& order);
  ArcResult execute(const Admit& order);
  ArcResult execute(const Fence& order);
  ArcResult execute(const Dismiss& order);
  ArcResult execute(const Hold& order);
  ArcResult execute(const Resume& order);
  ArcResult execute(const SetMemory& order);
  ArcResult execute(const AddTable& order);
  ArcResult execute(const DropTable& order);
  ArcResult execute(const AddShardOp& op);

  std::size_t forget(JobState& job, std::uint32_t rank);
  // What a job that ends, or is replaced, has begun.
  void drop_loads(std::uint32_t job);
  // The greatest clock of a table that the named jobs have reached.
  std::uint32_t reached(std::uint32_t id, const Table& table) const noexcept;
  void tick(JobState& job, std::uint32_t rank, std::span<const std::uint32_t> tables);
  void step_table(JobState& job, std::uint32_t id, Table& table);
  // The rows that are left to do, copied to the workspace if others lie between them.
  WriteRows rest(const Remainder& left, const WriteRows& rows, std::size_t dim, std::uint64_t sequence,
                 DedupWindow& dedup, SlotSlices& slices);
  // Calls use(slot, begin, end) for the slots that have hashes.
  template <class Use>
  void each_slot(const SlotSlices& slices, const Use& use) const;
  void mark(const SlotSlices& slices, std::uint64_t sequence, DedupWindow& dedup) const noexcept;
  void step_rows(const WriteId& write, Table& table, const SlotSlices& slices, const WriteRows& rows,
                 DedupWindow& dedup);

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
  Jobs jobs_;
  std::map<std::uint32_t, Table> tables_;
  std::vector<std::uint64_t> offsets_;  // one more than slots: scratch
};

}  // namespace shoal
