// ArcOp: what changes an arc: a validated operation on its slots. An arc is a deterministic function of its
// operations (replica/arc.h), so its copies execute the same ones in the same order.
//
//   PUSH, ASSIGN, ERASE      rows of the arc's slots, in order of their hashes, each once
//   CHANGE, SWEEP            functions of all rows that change rows
//   TICK, STEP               the end of a worker's clock; the next clock of a job that has ended is applied
//   LOAD_*, *_SAVE, MARK     checkpoints, and calls without effect on rows
//   orders of the scheduler  replica/orders.h
//
// Arrays are views of the received frames, or of other memory of the caller; a push that has to wait for the
// end of its clock is given their owner.
//
// Threads: values.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "batch/key_batch.h"
#include "policy/lifecycle.h"
#include "replica/dedup_window.h"
#include "replica/orders.h"
#include "replica/worker_id.h"
#include "shard/reductions.h"
#include "shard/shard.h"

namespace shoal {

// Who writes, and where.
struct WriteId {
  WorkerId worker{};
  std::uint64_t sequence = 0;
  std::uint32_t table = 0;
  std::uint32_t clock = 0;
  std::uint32_t step = 0;  // of a push that is applied at once: the step that it is; 0: the arc's next one
};

struct WriteRows {
  std::span<const std::uint64_t> hashes;
  std::span<const float> values;          // dim each: gradients or weights
  std::span<const std::uint32_t> counts;  // of a push; empty: all are 1
  bool is_whole = false;                  // changes of whole rows (shard/shard.h) in place of gradients
};

// The rows of a write in an arc, and how many of them are in slots that have executed it.
struct Remainder {
  SlotSlices slices{};
  std::size_t done = 0;
  const DedupWindow::PartialPush* partial = nullptr;
  bool any = false;  // whether something is left to do

  std::size_t rows() const noexcept { return slices.hashes.size() - done; }
};

struct PushOp {
  WriteId write;
  WriteRows rows;
  Remainder left;
  std::shared_ptr<const void> owner{};  // of the memory of the rows; null: they are copied if they are kept
};
struct AssignOp {
  WriteId write;
  WriteRows rows;
  Remainder left;
};
struct EraseOp {
  WriteId write;
  Remainder left;
};
// A function that changes rows of the slots [first, end).
struct ChangeOp {
  WriteId write;
  Function function;
  std::span<const double> parameters;
  std::size_t first = 0;
  std::size_t end = 0;
};
struct SweepOp {
  WriteId write;
  std::span<const Expiry> rules;
};
// Ends a clock of a worker, who pushed to these tables in it.
struct TickOp {
  WorkerId worker;
  std::span<const std::uint32_t> tables;
};
// Applies the next clock of a job, by its place in Jobs::all(), that has ended and is not applied. If it
// throws, it stays pending.
struct StepOp {
  std::size_t job = 0;
};
struct LoadBeginOp {
  WriteId write;
  std::shared_ptr<Shard> shard;
};
// Adds those of the rows that lie in the arc's slots.
struct LoadRowsOp {
  WriteId write;
  std::size_t rows = 0;
  std::span<const std::byte> section;
};
struct LoadFilterOp {
  WriteId write;
  Slots cut;
  Slot slot;
  std::span<const std::byte> filter;
};
struct LoadEndOp {
  WriteId write;
  std::uint64_t step = 0;
  std::uint32_t table_clock = 0;
  std::string base{};  // of the next delta
};
struct DropLoadOp {
  std::uint32_t table = 0;
};
// A save that another endpoint executes, of a base or a delta of this table.
struct BeginSaveOp {
  WriteId write;
};
// The end of all saves, of those of a job's workers, of one of them, or of the one that began with call
// `sequence`: its name, if it was written.
struct EndSavesOp {
  std::optional<std::uint32_t> job{};
  std::optional<std::uint32_t> rank{};
  std::optional<std::uint64_t> sequence{};
  std::optional<std::string> name{};
};
// A call without effect on rows was executed.
struct MarkOp {
  WriteId write;
};
// A table, with an empty shard (Arc::make_shard).
struct AddShardOp {
  std::uint32_t id = 0;
  std::shared_ptr<Shard> shard;
};

using ArcOp =
    std::variant<PushOp, AssignOp, EraseOp, ChangeOp, SweepOp, TickOp, StepOp, LoadBeginOp, LoadRowsOp,
                 LoadFilterOp, LoadEndOp, DropLoadOp, BeginSaveOp, EndSavesOp, MarkOp, AddShardOp, StartJob,
                 EndJob, Admit, Fence, Dismiss, Hold, Resume, SetMemory, AddTable, DropTable>;

// What an operation answers; views are valid until the arc's next operation.
struct ArcResult {
  std::span<const double> numbers{};       // CHANGE, also if it is repeated
  std::span<const std::uint64_t> words{};  // SWEEP: as Shard::sweep, also if it is repeated
  std::size_t dropped = 0;                 // ADMIT, DISMISS: pushes, of clocks that the worker has not ticked
  std::uint32_t clock = 0;                 // HOLD: that of the hold; DISMISS: the greatest of the job
  LastTick last{};                         // FENCE
};

}  // namespace shoal
