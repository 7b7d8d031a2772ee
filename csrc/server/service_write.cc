// Service: writes and ticks.

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

using wire::Header;
using wire::Status;

namespace {

// A tick names a message of a push, once for each arc, by its sequence and the slot of its last row there, which is executed
// last.
constexpr unsigned kSequenceBits = 48;
// How often a change is postponed while a save has no memory for it, after pauses that grow from 20 ms to 1 s; and how often
// a change of all rows is postponed during a save, which would have to preserve every row.
constexpr std::uint32_t kMaxPostponed = 3;
constexpr std::uint32_t kMaxPostponedAll = 16;
constexpr std::uint64_t kSequences = (std::uint64_t{1} << kSequenceBits) - 1;

}  // namespace

Arc::Write Service::write_of(const Call& call) noexcept {
  const Header& header = call.header;
  return {
      .worker = worker_of(header), .sequence = header.sequence, .table = header.table, .clock = header.clock};
}

PostponedCalls& Service::postponed(const Call& call) {
  auto& calls = job_of(call).postponed;
  const std::uint32_t rank = call.header.worker;
  if (rank >= calls.size()) {
    calls.resize(rank + std::size_t{1});
  }
  if (calls[rank] == nullptr) {
    calls[rank] = std::make_unique<PostponedCalls>();
  }
  return *calls[rank];
}

Service::View& Service::view(const Call& call) {
  auto& views = job_of(call).views[call.header.table];
  const std::uint32_t rank = call.header.worker;
  if (rank >= views.size()) {
    views.resize(rank + std::size_t{1});
  }
  return views[rank];
}

std::size_t Service::width_of(const Call& call, const Table& table) noexcept {
  return is_whole(call) ? table.rows.floats() : table.rows.dim();
}

bool Service::check_dim(const Call& call, const Table& table) {
  const std::size_t dim = width_of(call, table);
  if (call.header.dim == dim && call.floats.size() == call.hashes.size() * dim) {
    return check_dtype(call, table);
  }
  send_text(
      call, Status::kBadRequest,
      "table " + std::to_string(call.header.table) + " has " +
          (is_whole(call) ? "rows of " + std::to_string(dim) + " numbers" : "dim " + std::to_string(dim)) +
          ", got " + std::string(wire::name(call.header.dtype)) + " rows of " +
          std::to_string(call.header.dim));
  return false;
}

bool Service::check_whole(const Call& call, const Table& table) {
  if (!is_whole(call)) {
    return true;
  }
  if (!table.spec.optimizer.adds_up()) {
    send_text(call, Status::kBadRequest,
              "what steps of " + table.spec.optimizer.name() +
                  " change in copies of rows does not add up: pull weights and push gradients");
    return false;
  }
  if (mode(call.header.job) == Mode::kBsp) {
    send_text(call, Status::kBadRequest,
              "a job under BSP pulls weights and pushes gradients, not whole rows");
    return false;
  }
  return true;
}

bool Service::check_dtype(const Call& call, const Table& table) {
  if (call.header.dtype == wire::Dtype::kFloat32 || table.spec.optimizer.elements() == Elements::kFloat32) {
    return true;
  }
  send_text(
      call, Status::kBadRequest,
      "table " + std::to_string(call.header.table) + " has int64, got " +
          std::string(wire::name(call.header.dtype)) +
          " as the type of its rows: an integer is the bits of two float32, so send and request float32");
  return false;
}

// --- ticks ------------------------------------------------------------------------------------------------------

void Service::tick(const Call& call, std::span<const std::uint64_t> sequences,
                   std::span<const std::uint32_t> tables) {
  const Header& header = call.header;
  const auto clock_of = [&](const auto& arc) { return state(*arc, header.job).clocks.clock(header.worker); };
  if (!check_epoch(
          call)) {  // also if all arcs have it: its worker's map may have others here, which have moved
    return;
  }
  if (std::ranges::all_of(arcs_, [&](const auto& arc) { return header.clock < clock_of(arc); })) {
    ++metrics_.duplicates;
    return send(call, Status::kOk);
  }
  if (std::ranges::any_of(arcs_, [&](const auto& arc) {
        return clock_of(arc) == std::numeric_limits<std::uint32_t>::max();
      })) {
    return send_text(call, Status::kBadRequest, "a job has at most 2^32 - 1 clocks: connect anew");
  }
  const bool all_here = replays() || std::ranges::all_of(sequences, [&](std::uint64_t number) {
                          const std::uint64_t sequence = number & kSequences;
                          const std::size_t slot = number >> kSequenceBits;  // plus one; 0 for any
                          if (slot == 0) {
                            return std::ranges::any_of(arcs_, [&](const auto& arc) {
                              return arc->has_done(worker_of(header), sequence);
                            });
                          }
                          Arc* const arc = slot <= slots_.count() ? arc_of(slot - 1) : nullptr;
                          return arc != nullptr && arc->has_done(worker_of(header), sequence, slot - 1);
                        });
  if (!all_here ||
      std::ranges::any_of(arcs_, [&](const auto& arc) { return header.clock > clock_of(arc); })) {
    return send(call, Status::kRetry);
  }
  if (!replays() && mode(header.job) == Mode::kBsp && header.clock > applied(header.job) &&
      pending_bytes(header.job) - next_bytes(header.job) > limits_.pending_bytes / 2) {
    return send(call, Status::kOverloaded);
  }
  for (const auto& arc : arcs_) {
    // Else it took the tick before another one had no memory for it.
    if (clock_of(arc) == header.clock && !skips(*arc)) {
      touch(*arc);
      arc->tick(worker_of(header), tables);
    }
  }
  send(call, Status::kOk);
}

// --- once for every slot ----------------------------------------------------------------------------------------

bool Service::find_fresh(const Call& call) {
  bool left = false;
  bool repeated = false;
  for (Slice& slice : slices_) {
    slice.fresh = slice.arc->fresh(write_of(call), call.hashes.subspan(slice.begin, slice.count));
    left |= slice.fresh.any;
    repeated |= !slice.fresh.any || slice.fresh.done != 0 || slice.fresh.partial != nullptr;
  }
  metrics_.duplicates += repeated ? 1U : 0U;
  return left;
}

void Service::route_write(const Call& call) {
  route(call.hashes);
  if (call.hashes.empty()) {  // a call without keys concerns every arc
    for (const auto& arc : arcs_) {
      slices_.push_back({.arc = arc.get(), .begin = 0, .count = 0, .fresh = {}});
    }
  }
  if (replays()) {
    std::erase_if(slices_, [&](const Slice& slice) { return skips(*slice.arc); });
  }
}

Arc::Rows Service::rows_of(const Call& call, const Slice& slice, std::size_t dim) noexcept {
  return {.hashes = call.hashes.subspan(slice.begin, slice.count),
          .values = call.floats.subspan(slice.begin * dim, slice.count * dim),
          .counts = call.counts.empty() ? call.counts : call.counts.subspan(slice.begin, slice.count),
          .is_whole = is_whole(call)};
}

template <class Act>
void Service::each_fresh(const Act& act) {
  for (Slice& slice : slices_) {
    if (slice.fresh.any) {
      act(slice);
    }
  }
}

// --- push -------------------------------------------------------------------------------------------------------

std::string_view Service::full(const Call& call) const noexcept {
  for (const Slice& slice : slices_) {
    const Arc::Table* const table = slice.arc->find(call.header.table);
    if (!table->full.empty()) {
      return table->full;
    }
  }
  return {};
}

void Service::push(const Call& call, Table& table) {
  if (!check_whole(call, table) || !check_dim(call, table)) {
    return;
  }
  if (!call.counts.empty() && !table.spec.lifecycle.needs_counts()) {
    return send_text(call, Status::kBadRequest,
                     "table " + std::to_string(call.header.table) +
                         " has no rule that counts occurrences: send its pushes without counts");
  }
  route_write(call);
  if (const std::string_view why = full(call); !why.empty()) {
    return send_text(call, status_of_full(why), why);
  }
  const bool left = find_fresh(call);
  if (left && postpone(call)) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  if (left) {
    for (const Slice& slice : slices_) {
      const std::uint32_t clock = state(*slice.arc, call.header.job).clocks.clock(call.header.worker);
      if (slice.fresh.any && call.header.clock < clock) {
        return send_text(call, Status::kBadRequest,
                         "a push of clock " + std::to_string(call.header.clock) +
                             " came after the tick to clock " + std::to_string(clock) +
                             ", which did not name it");
      }
    }
    const std::size_t dim = width_of(call, table);
    if (mode(call.header.job) == Mode::kBsp) {
      if (!keep(call, dim)) {
        return;
      }
    } else {
      View& last = view(call);
      each_fresh([&](Slice& slice) {
        touch(*slice.arc);
        in_shard(call.received_ns,
                 [&] { slice.arc->push(write_of(call), rows_of(call, slice, dim), slice.fresh, nullptr); });
      });
      metrics_.push_staleness.add(table.pushes - last.pushes - last.own);
      ++table.pushes;
      ++last.own;
    }
  }
  send_done(call, std::move(refused));
}

bool Service::postpone(const Call& call) {
  const bool fits =
      replays() || std::ranges::all_of(slices_, [&](const Slice& slice) {
        return !slice.fresh.any || slice.arc->find(call.header.table)->shard->fits_save(slice.fresh.rows());
      });
  if (fits || !postponed(call).postpone(call.header.sequence, kMaxPostponed)) {
    return false;
  }
  send(call, Status::kOverloaded);
  return true;
}

bool Service::keep(const Call& call, std::size_t dim) {
  const Header& header = call.header;
  const std::size_t row_bytes =
      sizeof(std::uint64_t) + dim * sizeof(float) + (call.counts.empty() ? 0 : sizeof(std::uint32_t));
  std::size_t bytes = 0;
  bool is_whole = true;  // no slice was executed in part
  each_fresh([&](const Slice& slice) {
    bytes += slice.fresh.rows() * row_bytes;
    is_whole &= slice.fresh.done == 0;
  });
  const std::uint32_t applied = this->applied(header.job);
  const std::size_t next = next_bytes(header.job);
  if (!replays() && header.clock > applied &&
      pending_bytes(header.job) - next + bytes > limits_.pending_bytes / 2) {
    send(call, Status::kOverloaded);
    return false;
  }
  if (!replays() && header.clock == applied && next + bytes > limits_.pending_bytes) {
    send_text(call, Status::kBadRequest,
              "the pushes of clock " + std::to_string(header.clock) + " hold " +
                  std::to_string(next + bytes) + " bytes here, and the limit is " +
                  std::to_string(limits_.pending_bytes) +
                  ": push less in a clock, use more servers, or raise the limit of pending bytes");
    return false;
  }
  if (is_whole && !slices_.empty()) {
    // The arcs share the rows of the message.
    const Slice all{.arc = nullptr,
                    .begin = slices_.front().begin,
                    .count = slices_.back().begin + slices_.back().count - slices_.front().begin,
                    .fresh = {}};
    const Arc::Rows rows = rows_of(call, all, dim);
    PendingPushes::Push kept{.hashes = rows.hashes, .grads = rows.values, .counts = rows.counts};
    std::array<ReceivedFrame, 2> frames;
    if (call.received != nullptr) {
      frames = {call.received->take(std::as_bytes(rows.hashes)),
                call.received->take(std::as_bytes(rows.values))};
    }
    kept.keep(std::move(frames), workspace_.buffers);
    each_fresh([&](Slice& slice) {
      const std::size_t at = slice.begin - all.begin;
      const Arc::Rows mine{
          .hashes = kept.hashes.subspan(at, slice.count),
          .values = kept.grads.subspan(at * dim, slice.count * dim),
          .counts = kept.counts.empty() ? kept.counts : kept.counts.subspan(at, slice.count)};
      touch(*slice.arc);
      slice.arc->push(write_of(call), mine, slice.fresh, kept.owner);
    });
  } else {
    each_fresh([&](Slice& slice) {
      touch(*slice.arc);
      slice.arc->push(write_of(call), rows_of(call, slice, dim), slice.fresh, nullptr);
    });
  }
  metrics_.pending_peak = std::max(metrics_.pending_peak, pending_bytes());
  return true;
}

// --- assign, erase ----------------------------------------------------------------------------------------------

void Service::assign(const Call& call, Table& table) {
  if (!check_dim(call, table)) {
    return;
  }
  route_write(call);
  const bool left = find_fresh(call);
  if (left && postpone(call)) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  each_fresh([&](Slice& slice) {
    touch(*slice.arc);
    in_shard(call.received_ns,
             [&] { slice.arc->assign(write_of(call), rows_of(call, slice, table.rows.dim()), slice.fresh); });
  });
  send_done(call, std::move(refused));
}

void Service::erase(const Call& call) {
  route_write(call);
  const bool left = find_fresh(call);
  if (left && postpone(call)) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  each_fresh([&](Slice& slice) {
    touch(*slice.arc);
    slice.arc->erase(write_of(call), slice.fresh);
  });
  std::uint64_t erased = 0;
  for (const Slice& slice : slices_) {  // the call's other messages report the rest
    erased += slice.arc->erased(worker_of(call.header), call.header.sequence,
                                call.hashes.subspan(slice.begin, slice.count));
  }
  send_done(call, std::move(refused), static_cast<std::uint32_t>(erased));
}

// --- functions --------------------------------------------------------------------------------------------------

bool Service::has_done(const Call& call) {
  const bool done = !arcs_.empty() && std::ranges::all_of(arcs_, [&](const auto& arc) {
    return arc->has_done(worker_of(call.header), call.header.sequence);
  });
  metrics_.duplicates += done ? 1U : 0U;
  return done;
}

void Service::change(const Call& call) {
  const bool saves = std::ranges::any_of(
      arcs_, [&](const auto& arc) { return arc->find(call.header.table)->shard->is_saving(); });
  const bool done = has_done(call);
  if (!done && saves && !replays() && postponed(call).postpone(call.header.sequence, kMaxPostponedAll)) {
    return send(call, Status::kOverloaded);
  }
  std::vector<double> answers;
  for (const auto& arc : arcs_) {
    if (skips(*arc)) {
      break;
    }
    if (!done) {
      touch(*arc);
    }
    const auto served = std::ranges::find(served_, arc.get(), &Served::arc);
    const bool is_here = served != served_.end();
    const auto& some =
        arc->change(write_of(call), Function{call.header.aux}, doubles_of(call),
                    is_here ? served->first : arc->first_slot(), is_here ? served->end : arc->first_slot());
    answers.insert(answers.end(), some.begin(), some.end());
  }
  send_numbers(call, answers);
}

// --- sweeps -----------------------------------------------------------------------------------------------------

void Service::sweep(const Call& call) {
  const Header& header = call.header;
  const bool waits = mode(header.job) == Mode::kBsp;
  const bool done = has_done(call);
  if (!done && waits) {
    if (std::ranges::any_of(arcs_, [&](const auto& arc) {
          return header.clock < state(*arc, header.job).applied &&
                 !arc->has_done(worker_of(header), header.sequence);
        })) {
      return send_text(call, Status::kBadRequest,
                       "a sweep of clock " + std::to_string(header.clock) + " came after its end");
    }
    if (!is_complete(header.job, header.clock)) {
      return defer(call, 0);
    }
  }
  const auto rules = Lifecycle::expiries(doubles_of(call));
  std::vector<std::uint64_t> answer;
  for (const auto& arc : arcs_) {
    if (skips(*arc)) {
      break;
    }
    if (!done) {
      touch(*arc);
    }
    add_words(answer, arc->sweep(write_of(call), rules));
  }
  send_words(call, answer);
}

// --- loads ------------------------------------------------------------------------------------------------------

bool Service::done_before(const Call& call) {
  const bool done = has_done(call);
  if (done) {
    send(call, Status::kOk);
  }
  return done;
}

bool Service::check_loading(const Call& call, std::uint32_t id) {
  const bool loading = std::ranges::all_of(arcs_, [&](const auto& arc) {
    const Arc::Table& table = *arc->find(id);
    return (table.loading != nullptr && table.loader == worker_of(call.header)) ||
           arc->has_done(worker_of(call.header), call.header.sequence);
  });
  if (!loading) {
    send_text(call, Status::kBadRequest, "no load of this worker is under way: begin one first");
  }
  return loading;
}

void Service::load_begin(const Call& call, Table& table, std::span<const std::uint64_t> rows) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 46U;  // of rows; more than any machine has
  if (done_before(call)) {
    return;
  }
  if (rows.size() != slots_.count()) {
    return send_text(call, Status::kBadRequest,
                     "a load names the rows of " + std::to_string(slots_.count()) + " slots, got " +
                         std::to_string(rows.size()) + " numbers");
  }
  std::vector<std::size_t> here(slots_.count(), 0);
  std::size_t most = kMaxBytes / (table.rows.bytes() + sizeof(std::uint64_t));
  for (const Served& served : served_) {
    for (std::size_t s = served.first; s < served.end; ++s) {
      if (rows[s] > most) {
        return send_text(
            call, Status::kBadRequest,
            "no machine has memory for " + std::to_string(rows[s]) + " rows in slot " + std::to_string(s));
      }
      most -= rows[s];
      here[s] = rows[s];
    }
  }
  std::vector<std::shared_ptr<Shard>> fresh;
  for (const auto& arc : arcs_) {
    fresh.push_back(arc->make_shard(table.spec));
    fresh.back()->reserve(slots_, here);
  }
  for (std::size_t i = 0; i < arcs_.size(); ++i) {
    arcs_[i]->load_begin(write_of(call), std::move(fresh[i]));
  }
  send(call, Status::kOk);
}

void Service::load_rows(const Call& call) {
  if (done_before(call) || !check_loading(call, call.header.table)) {
    return;
  }
  // The hashes come first in a section; restore() checks that they ascend.
  const std::size_t rows =
      std::min<std::size_t>(call.header.count, call.bytes.size() / sizeof(std::uint64_t));
  const std::span hashes(reinterpret_cast<const std::uint64_t*>(call.bytes.data()), rows);
  std::vector<bool> present(slots_.count());
  for (const std::uint64_t hash : hashes) {
    present[index_of(slots_.of(hash))] = true;
  }
  refused_.clear();
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    if (present[s] && !serves(s)) {
      refused_.push_back(static_cast<std::uint16_t>(s));
    }
  }
  if (!refused_.empty()) {
    return send_done(call, refusal(call.out));
  }
  for (const auto& arc : arcs_) {
    const auto first = present.begin() + static_cast<std::ptrdiff_t>(arc->first_slot());
    const auto end = present.begin() + static_cast<std::ptrdiff_t>(arc->end_slot());
    // The first arc checks a section without rows.
    if (std::find(first, end, true) != end || (rows == 0 && arc == arcs_.front())) {
      arc->load_rows(write_of(call), call.header.count, call.bytes);
    }
  }
  for (const auto& arc : arcs_) {
    arc->mark(write_of(call));
  }
  send(call, Status::kOk);
}

void Service::load_filter(const Call& call) {
  if (done_before(call) || !check_loading(call, call.header.table)) {
    return;
  }
  const Slots cut(call.header.count);
  if (cut.bits() < slots_.bits() || call.header.aux >= cut.count()) {
    return send_text(call, Status::kBadRequest,
                     "there is no slot " + std::to_string(call.header.aux) + " of " +
                         std::to_string(cut.count()) + " in one of " + std::to_string(slots_.count()));
  }
  const std::size_t slot = call.header.aux >> (cut.bits() - slots_.bits());
  refused_.clear();
  if (!serves(slot)) {
    refused_.push_back(static_cast<std::uint16_t>(slot));
    return send_done(call, refusal(call.out));
  }
  arc_of(slot)->load_filter(write_of(call), cut, Slot{call.header.aux}, call.bytes);
  for (const auto& arc : arcs_) {
    arc->mark(write_of(call));
  }
  send(call, Status::kOk);
}

void Service::load_end(const Call& call, std::span<const std::uint64_t> step) {
  if (done_before(call)) {
    return;
  }
  if (step.size() != 1 && step.size() != 2 && step.size() != 2 + wire::kBaseWords) {
    return send_text(
        call, Status::kBadRequest,
        "a load ends with the table's step, clock and base, got " + std::to_string(step.size()) + " numbers");
  }
  if (!check_loading(call, call.header.table)) {
    return;
  }
  const std::uint32_t clock = step.size() > 1 ? static_cast<std::uint32_t>(step[1]) : 0;
  const std::string base = step.size() > 2 ? wire::base_name(step.subspan(2)) : std::string();
  for (const auto& arc : arcs_) {
    arc->load_end(write_of(call), step[0], clock, base);
  }
  send(call, Status::kOk);
}

}  // namespace shoal
