// Writes are executed once per slot and sequence number; where an arc fails, a repetition continues with it.
// A TICK is accepted, by all arcs, when it is the worker's next one and all pushes that it names have been
// received; a repeated one is acknowledged again; otherwise the reply is RETRY. A BSP step that would exceed
// the memory budget is not made, and the next pulls and pushes of the table report it. A change for which a
// concurrent save has no memory is postponed a few times: the service never waits for a disk.

#include "endpoint/writes.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "endpoint/reads.h"

namespace shoal {

using wire::Op;
using wire::Status;

namespace {

// A tick names a message of a push, once for each arc, by its sequence and the slot of its last row there,
// which is executed last.
constexpr unsigned kSequenceBits = 48;
constexpr std::uint64_t kSequences = (std::uint64_t{1} << kSequenceBits) - 1;
// How often a change is postponed while a save has no memory for it, after pauses that grow from 20 ms to 1
// s; and how often a change of all rows is postponed during a save, which would have to preserve every row.
constexpr std::uint32_t kMaxPostponed = 3;
constexpr std::uint32_t kMaxPostponedAll = 16;

std::optional<Refusal> check_dim(const RequestContext& request, const ServedTable& table) {
  const std::size_t dim = ServiceState::width_of(request, table);
  if (request.header.dim == dim && request.floats.size() == request.hashes.size() * dim) {
    return check_dtype(request, table);
  }
  return bad_request(
      "table " + std::to_string(request.header.table) + " has " +
      (request.is_whole() ? "rows of " + std::to_string(dim) + " numbers" : "dim " + std::to_string(dim)) +
      ", got " + std::string(wire::name(request.header.dtype)) + " rows of " +
      std::to_string(request.header.dim));
}

// Whether a concurrent save has no memory for the rows that it would have to preserve, and the change can
// wait for it.
bool is_postponed(ServiceState& state, const RequestContext& request) {
  const bool fits = std::ranges::all_of(state.cut.slices, [&](const Slice& slice) {
    return !slice.left.any || slice.arc->find(request.header.table)->shard->changes().fits(slice.left.rows());
  });
  return state.cut.any_left && !fits &&
         state.postponed(request).postpone(request.header.sequence, kMaxPostponed);
}

void cut_write(ServiceState& state, const RequestContext& request) {
  state.arcs.cut(request.write(), request.hashes, state.cut);
  state.metrics.duplicates += state.cut.is_repeated ? 1U : 0U;
}

bool has_done(ServiceState& state, const RequestContext& request) {
  const bool is_done = state.arcs.has_done(request.write());
  state.metrics.duplicates += is_done ? 1U : 0U;
  return is_done;
}

// --- push -------------------------------------------------------------------------------------------------

// Whether the pushes that wait for the end of their clocks may take what is left of this one.
std::optional<Refusal> check_pending(const ServiceState& state, const RequestContext& request,
                                     std::size_t dim) {
  const wire::Header& header = request.header;
  const std::size_t row_bytes =
      sizeof(std::uint64_t) + dim * sizeof(float) + (request.counts.empty() ? 0 : sizeof(std::uint32_t));
  std::size_t bytes = 0;
  for (const Slice& slice : state.cut.slices) {
    bytes += slice.left.any ? slice.left.rows() * row_bytes : 0;
  }
  const std::uint32_t applied = state.arcs.applied(header.job);
  const std::size_t next = state.arcs.next_bytes(header.job);
  if (header.clock > applied &&
      state.arcs.pending_bytes(header.job) - next + bytes > state.limits.pending_bytes / 2) {
    return Refusal{Status::kOverloaded};
  }
  if (header.clock == applied && next + bytes > state.limits.pending_bytes) {
    return bad_request("the pushes of clock " + std::to_string(header.clock) + " hold " +
                       std::to_string(next + bytes) + " bytes here, and the limit is " +
                       std::to_string(state.limits.pending_bytes) +
                       ": push less in a clock, use more servers, or raise the limit of pending bytes");
  }
  return std::nullopt;
}

Outcome push(ServiceState& state, RequestContext& request, ServedTable& table) {
  const wire::Header& header = request.header;
  if (auto refusal = check_whole(state, request, table)) {
    return *std::move(refusal);
  }
  if (auto refusal = check_dim(request, table)) {
    return *std::move(refusal);
  }
  if (!request.counts.empty() && !table.spec.lifecycle.needs_counts()) {
    return bad_request("table " + std::to_string(header.table) +
                       " has no rule that counts occurrences: send its pushes without counts");
  }
  cut_write(state, request);
  if (const StepFailure* const failed = ArcGroup::failed_step(state.cut, header.table); failed != nullptr) {
    return Refusal{failed->status, failed->text};
  }
  if (is_postponed(state, request)) {
    return Refusal{Status::kOverloaded};
  }
  PooledBuffer refused = refused_slots(state.cut, request.out);
  if (!state.cut.any_left) {
    return done(std::move(refused));
  }
  for (const Slice& slice : state.cut.slices) {
    const std::uint32_t clock = slice.arc->jobs().find(header.job)->clocks.clock(header.worker);
    if (slice.left.any && header.clock < clock) {
      return bad_request("a push of clock " + std::to_string(header.clock) +
                         " came after the tick to clock " + std::to_string(clock) +
                         ", which did not name it");
    }
  }
  std::uint32_t position = 0;  // among the pushes of the table that were applied at once
  const std::size_t dim = ServiceState::width_of(request, table);
  const auto execute = [&] {
    state.arcs.push(request.write(), request.rows(), dim, state.cut, request.received, request.changed);
  };
  if (state.arcs.mode(header.job) == Mode::kBsp) {
    if (header.aux != 0) {
      return bad_request("a push of a job under BSP is no step of its own: send it without a step, got " +
                         std::to_string(header.aux));
    }
    if (auto refusal = check_pending(state, request, dim)) {
      return *std::move(refusal);
    }
    execute();
    state.metrics.pending_peak = std::max(state.metrics.pending_peak, state.arcs.pending_bytes());
  } else {
    TableView& last = state.view(request);
    state.in_rows(request, execute);
    state.metrics.push_staleness.add(table.pushes - last.pushes - last.own);
    position = static_cast<std::uint32_t>(++table.pushes);
    ++last.own;
  }
  return done(std::move(refused), position);
}

// --- assign, erase ----------------------------------------------------------------------------------------

Outcome assign(ServiceState& state, RequestContext& request, ServedTable& table) {
  if (auto refusal = check_dim(request, table)) {
    return *std::move(refusal);
  }
  cut_write(state, request);
  if (is_postponed(state, request)) {
    return Refusal{Status::kOverloaded};
  }
  PooledBuffer refused = refused_slots(state.cut, request.out);
  state.in_rows(request, [&] {
    ArcGroup::assign(request.write(), request.rows(), table.rows.dim(), state.cut, request.changed);
  });
  return done(std::move(refused));
}

Outcome erase(ServiceState& state, RequestContext& request) {
  cut_write(state, request);
  if (is_postponed(state, request)) {
    return Refusal{Status::kOverloaded};
  }
  PooledBuffer refused = refused_slots(state.cut, request.out);
  const std::uint64_t erased = ArcGroup::erase(request.write(), request.hashes, state.cut, request.changed);
  return done(std::move(refused), static_cast<std::uint32_t>(erased));
}

// --- functions --------------------------------------------------------------------------------------------

Outcome change(ServiceState& state, RequestContext& request) {
  const bool is_saving = std::ranges::any_of(state.arcs.arcs(), [&](const auto& arc) {
    return arc->find(request.header.table)->shard->changes().is_saving();
  });
  if (!has_done(state, request) && is_saving &&
      state.postponed(request).postpone(request.header.sequence, kMaxPostponedAll)) {
    return Refusal{Status::kOverloaded};
  }
  return numbers_answer(
      state.arcs.change(request.write(), Function{request.header.aux}, request.doubles(), request.changed),
      request.header.aux, request.out);
}

}  // namespace

Outcome sweep(ServiceState& state, RequestContext& request) {
  const wire::Header& header = request.header;
  if (!has_done(state, request) && state.arcs.mode(header.job) == Mode::kBsp) {
    if (std::ranges::any_of(state.arcs.arcs(), [&](const auto& arc) {
          return header.clock < arc->jobs().find(header.job)->applied &&
                 !arc->jobs().has_done(request.worker(), header.sequence);
        })) {
      return bad_request("a sweep of clock " + std::to_string(header.clock) + " came after its end");
    }
    if (!state.arcs.is_complete(header.job, header.clock)) {
      return defer(state, request, 0);
    }
  }
  const auto rules = Lifecycle::expiries(request.doubles());
  return words_answer(state.arcs.sweep(request.write(), rules, request.changed), request.out);
}

Outcome tick(ServiceState& state, RequestContext& request) {
  const wire::Header& header = request.header;
  if (!state.has_newest_map(
          request)) {  // also if all arcs have it: its worker's map may have others here, which have moved
    return wrong_epoch();
  }
  const auto [least, greatest] = state.arcs.clocks_of(request.worker());
  if (header.clock < least) {
    ++state.metrics.duplicates;
    return Answer{};
  }
  if (greatest == std::numeric_limits<std::uint32_t>::max()) {
    return bad_request("a job has at most 2^32 - 1 clocks: connect anew");
  }
  const bool all_here = std::ranges::all_of(request.numbers, [&](std::uint64_t number) {
    const std::uint64_t sequence = number & kSequences;
    const std::size_t slot = number >> kSequenceBits;  // plus one; 0 for any
    if (slot == 0) {
      return std::ranges::any_of(state.arcs.arcs(), [&](const auto& arc) {
        return arc->jobs().has_done(request.worker(), sequence);
      });
    }
    const Arc* const arc = slot <= state.slots.count() ? state.arcs.arc_of(slot - 1) : nullptr;
    return arc != nullptr && arc->jobs().has_done(request.worker(), sequence, slot - 1);
  });
  if (!all_here || header.clock > least) {
    return Refusal{Status::kRetry};
  }
  if (state.arcs.mode(header.job) == Mode::kBsp && header.clock > state.arcs.applied(header.job) &&
      state.arcs.pending_bytes(header.job) - state.arcs.next_bytes(header.job) >
          state.limits.pending_bytes / 2) {
    return Refusal{Status::kOverloaded};
  }
  state.arcs.tick(request.worker(), header.clock, request.tables, request.changed);
  return Answer{};
}

Outcome write(ServiceState& state, RequestContext& request, ServedTable& table) {
  switch (request.header.op) {
    case Op::kPush:
      return push(state, request, table);
    case Op::kAssign:
      return assign(state, request, table);
    case Op::kErase:
      return erase(state, request);
    case Op::kReduce:
      return change(state, request);
    case Op::kSweep:
      return sweep(state, request);
    default:
      return load(state, request, table);
  }
}

}  // namespace shoal
