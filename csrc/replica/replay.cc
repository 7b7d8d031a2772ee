#include "replica/replay.h"

#include <algorithm>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "shard/snapshot.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

void step_all(ArcGroup& arcs) noexcept {
  std::uint64_t failures = 0;
  const auto waits = [](const JobState&) { return false; };
  while (arcs.step(waits, failures, [](const auto& work) { work(); }) && failures == 0) {
  }
}

std::span<const double> doubles_of(const wire::Decoded& request) noexcept {
  return {reinterpret_cast<const double*>(request.values.data()), request.values.size() / sizeof(double)};
}

// What one request is executed with.
struct Replayed {
  const wire::Decoded& request;
  const std::size_t end_slot;
  ArcGroup& arcs;
  Cut& cut;
  const WriteId write;
  ChangedArcs changed{};

  Status push();
  Status assign();
  Status tick();
  Status save_begin();
  Status save_end();
  Status execute();
};

Status Replayed::push() {
  const Header& header = request.header;
  const bool is_whole = (header.flags & wire::kWhole) != 0;
  arcs.cut(write, request.hashes, cut, end_slot);
  for (const Slice& slice : cut.slices) {
    const Rows& form = slice.arc->find(header.table)->shard->rows();
    const std::size_t dim = is_whole ? form.floats() : form.dim();
    const bool is_late =
        slice.left.any && header.clock < slice.arc->jobs().find(header.job)->clocks.clock(header.worker);
    if (header.dim != dim || request.floats().size() != request.hashes.size() * dim || is_late) {
      return Status::kBadRequest;
    }
  }
  arcs.push(
      write,
      {.hashes = request.hashes, .values = request.floats(), .counts = request.counts, .is_whole = is_whole},
      header.dim, cut, nullptr, changed);
  return Status::kOk;
}

Status Replayed::assign() {
  const Header& header = request.header;
  arcs.cut(write, request.hashes, cut, end_slot);
  for (const Slice& slice : cut.slices) {
    if (header.dim != slice.arc->find(header.table)->shard->rows().dim() ||
        request.floats().size() != request.hashes.size() * header.dim) {
      return Status::kBadRequest;
    }
  }
  ArcGroup::assign(write, {.hashes = request.hashes, .values = request.floats(), .counts = {}}, header.dim,
                   cut, changed);
  return Status::kOk;
}

Status Replayed::tick() {
  const Header& header = request.header;
  const auto [least, greatest] = arcs.clocks_of(write.worker);
  if (header.clock < least) {
    return Status::kOk;
  }
  if (greatest == std::numeric_limits<std::uint32_t>::max()) {
    return Status::kBadRequest;
  }
  if (header.clock > least) {
    return Status::kRetry;
  }
  arcs.tick(write.worker, header.clock, request.tables, changed, end_slot);
  return Status::kOk;
}

// The primary has begun the save: only the recorded changes follow, for deltas.
Status Replayed::save_begin() {
  constexpr unsigned kKindShift = 32;
  if (arcs.has_done(write)) {
    return Status::kOk;
  }
  if (request.numbers.size() <= wire::kBaseWords) {
    return Status::kBadRequest;
  }
  for (const auto& arc : arcs.arcs()) {
    if (arc->first_slot() >= end_slot) {
      continue;
    }
    arc->apply(EndSavesOp{.job = write.worker.job, .rank = write.worker.rank});
    for (const std::uint64_t number : request.numbers.subspan(wire::kBaseWords)) {
      const std::uint64_t kind = number >> kKindShift;
      if (kind == static_cast<std::uint64_t>(Snapshot::Kind::kBase) ||
          kind == static_cast<std::uint64_t>(Snapshot::Kind::kDelta)) {
        WriteId of_table = write;
        of_table.table = static_cast<std::uint32_t>(number);
        arc->apply(BeginSaveOp{.write = of_table});
      }
    }
  }
  arcs.mark(write, changed, end_slot);
  return Status::kOk;
}

Status Replayed::save_end() {
  const auto numbers = request.numbers;
  if (arcs.has_done(write)) {
    return Status::kOk;
  }
  if (numbers.size() != 1 && numbers.size() != 1 + wire::kBaseWords) {
    return Status::kBadRequest;
  }
  const std::optional<std::string> name =
      numbers.size() > 1 ? std::optional(wire::base_name(numbers.subspan(1))) : std::nullopt;
  for (const auto& arc : arcs.arcs()) {
    if (arc->first_slot() < end_slot) {
      arc->apply(EndSavesOp{
          .job = write.worker.job, .rank = write.worker.rank, .sequence = numbers[0], .name = name});
    }
  }
  if (numbers[0] < write.sequence) {
    WriteId begun = write;
    begun.sequence = numbers[0];
    arcs.mark(begun, changed, end_slot);
  }
  arcs.mark(write, changed, end_slot);
  return Status::kOk;
}

Status Replayed::execute() {
  const Header& header = request.header;
  if (header.worker == wire::kAnonymous) {
    return Status::kBadRequest;
  }
  if (const Status status = arcs.admits(write.worker, header.incarnation); status != Status::kOk) {
    return status;
  }
  switch (header.op) {
    case Op::kTick:
      return tick();
    case Op::kSaveBegin:
      return save_begin();
    case Op::kSaveEnd:
      return save_end();
    default:
      break;
  }
  if (!arcs.has_table(header.table)) {
    return Status::kNoTable;
  }
  switch (header.op) {
    case Op::kPush:
      return push();
    case Op::kAssign:
      return assign();
    case Op::kErase:
      arcs.cut(write, request.hashes, cut, end_slot);
      ArcGroup::erase(write, request.hashes, cut, changed);
      return Status::kOk;
    case Op::kReduce:
      arcs.change(write, Function{header.aux}, doubles_of(request), changed, end_slot);
      return Status::kOk;
    case Op::kSweep:
      arcs.sweep(write, Lifecycle::expiries(doubles_of(request)), changed, end_slot);
      return Status::kOk;
    default:
      return Status::kBadRequest;  // no primary logs it
  }
}

}  // namespace

Status status_of(const std::exception& error) noexcept {
  if (dynamic_cast<const std::invalid_argument*>(&error) != nullptr) {
    return Status::kBadRequest;
  }
  return dynamic_cast<const MemoryBudgetExceededError*>(&error) != nullptr ? Status::kResourceExhausted
                                                                           : Status::kInternal;
}

Status replay(const wire::Decoded& request, std::size_t end_slot, ArcGroup& arcs, Cut& cut) noexcept {
  const Header& header = request.header;
  Replayed replayed{.request = request,
                    .end_slot = end_slot,
                    .arcs = arcs,
                    .cut = cut,
                    .write = {.worker = {.job = header.job, .rank = header.worker},
                              .sequence = header.sequence,
                              .table = header.table,
                              .clock = header.clock,
                              .step = header.op == Op::kPush ? header.aux : 0}};
  Status status = Status::kInternal;
  try {
    status = replayed.execute();
  } catch (const std::exception& error) {
    status = status_of(error);
  }
  step_all(arcs);
  return status;
}

void replay(const KeptRecord& record, ArcGroup& arcs, Cut& cut, wire::Decoded& decoded) {
  if (!record.is_request) {
    execute(decode_order(record.frames.front()), arcs);
    return;
  }
  const std::vector<wire::Frame> frames(record.frames.begin(), record.frames.end());
  const wire::Limits limits{.payload_bytes = std::numeric_limits<std::uint64_t>::max(), .replies = false};
  if (!wire::decode(frames, limits, decoded)) {
    replay(decoded, record.end_slot, arcs, cut);
  }
}

ArcResult execute(const Order& order, ArcGroup& arcs) {
  ArcResult result = arcs.apply(order);
  step_all(arcs);
  return result;
}

}  // namespace shoal
