// ArcGroup: requests, and the clocks of jobs.

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "replica/arc_group.h"

namespace shoal {

namespace {

WriteRows rows_of(const WriteRows& rows, const Slice& slice, std::size_t dim) noexcept {
  return {.hashes = rows.hashes.subspan(slice.begin, slice.count),
          .values = rows.values.subspan(slice.begin * dim, slice.count * dim),
          .counts = rows.counts.empty() ? rows.counts : rows.counts.subspan(slice.begin, slice.count),
          .is_whole = rows.is_whole};
}

// Has each arc of which something is left execute what make(slice) returns.
template <class Make>
void each_left(const Cut& cut, ChangedArcs& changed, const Make& make) {
  for (const Slice& slice : cut.slices) {
    if (slice.left.any) {
      changed.push_back(slice.arc->range());
      slice.arc->apply(make(slice));
    }
  }
}

}  // namespace

// --- requests ---------------------------------------------------------------------------------------------

wire::Status ArcGroup::admits(const WorkerId& worker, std::uint32_t incarnation, bool agree) const noexcept {
  using State = Clocks::WorkerState;
  wire::Status status = wire::Status::kOk;
  for (const auto& arc : std::span(arcs_).first(agree ? 1 : arcs_.size())) {
    const JobState* const job = arc->jobs().find(worker.job);
    const State state = job == nullptr ? State::kUnknown : job->clocks.state(worker.rank, incarnation);
    if (state == State::kFenced) {
      return wire::Status::kFenced;
    }
    status = state == State::kUnknown ? wire::Status::kNotAdmitted : status;
  }
  return status;
}

void ArcGroup::cut(std::span<const std::uint64_t> hashes, Cut& to) const {
  to.slices.clear();
  to.refused.clear();
  // The first hash, from number `from` on, of this slot or a later one.
  const auto position_of = [&](std::size_t slot, std::size_t from) {
    if (slot == slots_.count()) {
      return hashes.size();
    }
    const std::uint64_t bound = slots_.first_hash(Slot{static_cast<std::uint32_t>(slot)});
    if (from == hashes.size() || hashes[from] >= bound) {
      return from;
    }
    return static_cast<std::size_t>(
        std::lower_bound(hashes.begin() + static_cast<std::ptrdiff_t>(from), hashes.end(), bound) -
        hashes.begin());
  };
  const auto refuse = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end;) {
      const std::size_t slot = index_of(slots_.of(hashes[i]));
      to.refused.push_back(static_cast<std::uint16_t>(slot));
      i = position_of(slot + 1, i);
    }
  };
  std::size_t at = 0;
  for (const Served& served : served_) {
    const std::size_t begin = position_of(served.first, at);
    refuse(at, begin);
    at = position_of(served.end, begin);
    if (begin != at) {
      to.slices.push_back({.arc = served.arc, .begin = begin, .count = at - begin});
    }
  }
  refuse(at, hashes.size());
}

void ArcGroup::cut(const WriteId& write, std::span<const std::uint64_t> hashes, Cut& to,
                   std::size_t end_slot) const {
  cut(hashes, to);
  if (hashes.empty()) {
    for (const auto& arc : arcs_) {
      to.slices.push_back({.arc = arc.get(), .begin = 0, .count = 0});
    }
  }
  if (end_slot != kAllSlots) {
    std::erase_if(to.slices, [&](const Slice& slice) { return slice.arc->first_slot() >= end_slot; });
  }
  to.any_left = to.is_repeated = false;
  for (Slice& slice : to.slices) {
    slice.left = slice.arc->remainder(write, hashes.subspan(slice.begin, slice.count));
    to.any_left |= slice.left.any;
    to.is_repeated |= !slice.left.any || slice.left.done != 0 || slice.left.partial != nullptr;
  }
}

const StepFailure* ArcGroup::failed_step(const Cut& cut, std::uint32_t table) noexcept {
  for (const Slice& slice : cut.slices) {
    if (const auto& failed = slice.arc->find(table)->failed_step; failed) {
      return &*failed;
    }
  }
  return nullptr;
}

void ArcGroup::push(const WriteId& write, const WriteRows& rows, std::size_t dim, const Cut& cut,
                    MultipartMessage* received, ChangedArcs& changed) {
  // Under BSP the arcs share the rows of the message, unless some was executed in part.
  const bool is_shared = mode(write.worker.job) == Mode::kBsp && !cut.slices.empty() &&
                         std::ranges::all_of(cut.slices, [](const Slice& slice) {
                           return !slice.left.any || slice.left.done == 0;
                         });
  if (!is_shared) {
    return each_left(cut, changed, [&](const Slice& slice) {
      return PushOp{.write = write, .rows = rows_of(rows, slice, dim), .left = slice.left};
    });
  }
  const std::size_t first = cut.slices.front().begin;
  const Slice whole{
      .arc = nullptr, .begin = first, .count = cut.slices.back().begin + cut.slices.back().count - first};
  const WriteRows all = rows_of(rows, whole, dim);
  PendingPushes::Push kept{.hashes = all.hashes, .grads = all.values, .counts = all.counts};
  std::array<ReceivedFrame, 2> frames;
  if (received != nullptr) {
    frames = {received->take(std::as_bytes(all.hashes)), received->take(std::as_bytes(all.values))};
  }
  kept.keep(std::move(frames), workspace_.buffers);
  const WriteRows shared{
      .hashes = kept.hashes, .values = kept.grads, .counts = kept.counts, .is_whole = rows.is_whole};
  each_left(cut, changed, [&](const Slice& slice) {
    const Slice within{.arc = slice.arc, .begin = slice.begin - first, .count = slice.count};
    return PushOp{
        .write = write, .rows = rows_of(shared, within, dim), .left = slice.left, .owner = kept.owner};
  });
}

void ArcGroup::assign(const WriteId& write, const WriteRows& rows, std::size_t dim, const Cut& cut,
                      ChangedArcs& changed) {
  each_left(cut, changed, [&](const Slice& slice) {
    return AssignOp{.write = write, .rows = rows_of(rows, slice, dim), .left = slice.left};
  });
}

std::uint64_t ArcGroup::erase(const WriteId& write, std::span<const std::uint64_t> hashes, const Cut& cut,
                              ChangedArcs& changed) {
  each_left(cut, changed, [&](const Slice& slice) { return EraseOp{.write = write, .left = slice.left}; });
  std::uint64_t erased = 0;
  for (const Slice& slice : cut.slices) {  // the call's other messages report the rest
    erased += slice.arc->erased(write.worker, write.sequence, hashes.subspan(slice.begin, slice.count));
  }
  return erased;
}

template <class Use>
void ArcGroup::each_below(std::size_t end_slot, const Use& use) const {
  for (const auto& arc : arcs_) {
    if (arc->first_slot() < end_slot) {
      use(*arc);
    }
  }
}

std::vector<double> ArcGroup::change(const WriteId& write, Function function,
                                     std::span<const double> parameters, ChangedArcs& changed,
                                     std::size_t end_slot) {
  const bool is_done = has_done(write);
  std::vector<double> answers;
  each_below(end_slot, [&](Arc& arc) {
    if (!is_done) {
      changed.push_back(arc.range());
    }
    const auto served = std::ranges::find(served_, &arc, &Served::arc);
    const bool is_here = served != served_.end();
    const auto numbers = arc.apply(ChangeOp{.write = write,
                                            .function = function,
                                            .parameters = parameters,
                                            .first = is_here ? served->first : arc.first_slot(),
                                            .end = is_here ? served->end : arc.first_slot()})
                             .numbers;
    answers.insert(answers.end(), numbers.begin(), numbers.end());
  });
  return answers;
}

std::vector<std::uint64_t> ArcGroup::sweep(const WriteId& write, std::span<const Expiry> rules,
                                           ChangedArcs& changed, std::size_t end_slot) {
  const bool is_done = has_done(write);
  std::vector<std::uint64_t> sums;
  each_below(end_slot, [&](Arc& arc) {
    if (!is_done) {
      changed.push_back(arc.range());
    }
    const auto words = arc.apply(SweepOp{.write = write, .rules = rules}).words;
    sums.resize(std::max(sums.size(), words.size()));
    std::ranges::transform(words, sums, sums.begin(), std::plus<>());
  });
  return sums;
}

void ArcGroup::tick(const WorkerId& worker, std::uint32_t clock, std::span<const std::uint32_t> tables,
                    ChangedArcs& changed, std::size_t end_slot) {
  each_below(end_slot, [&](Arc& arc) {
    // Else it took the tick before another one had no memory for it.
    if (arc.jobs().find(worker.job)->clocks.clock(worker.rank) == clock) {
      changed.push_back(arc.range());
      arc.apply(TickOp{.worker = worker, .tables = tables});
    }
  });
}

void ArcGroup::mark(const WriteId& write, ChangedArcs& changed, std::size_t end_slot) {
  each_below(end_slot, [&](Arc& arc) {
    changed.push_back(arc.range());
    arc.apply(MarkOp{.write = write});
  });
}

bool ArcGroup::has_done(const WriteId& write) const noexcept {
  return !arcs_.empty() && std::ranges::all_of(arcs_, [&](const auto& arc) {
    return arc->jobs().has_done(write.worker, write.sequence);
  });
}

std::pair<std::uint32_t, std::uint32_t> ArcGroup::clocks_of(const WorkerId& worker) const noexcept {
  std::pair<std::uint32_t, std::uint32_t> clocks{std::numeric_limits<std::uint32_t>::max(), 0};
  for (const auto& arc : arcs_) {
    const std::uint32_t clock = arc->jobs().find(worker.job)->clocks.clock(worker.rank);
    clocks = {std::min(clocks.first, clock), std::max(clocks.second, clock)};
  }
  return clocks;
}

// --- clocks of a job --------------------------------------------------------------------------------------

Mode ArcGroup::mode(std::uint32_t job) const noexcept {
  const JobState* const state = arcs_.empty() ? nullptr : arcs_.front()->jobs().find(job);
  return state == nullptr ? Mode::kAsp : state->mode;
}

template <class Get>
std::optional<std::uint32_t> ArcGroup::least(std::uint32_t job, const Get& get) const noexcept {
  std::optional<std::uint32_t> found;
  for (const auto& arc : arcs_) {
    if (const JobState* const state = arc->jobs().find(job); state != nullptr) {
      found = std::min(found.value_or(get(*state)), get(*state));
    }
  }
  return found;
}

std::uint32_t ArcGroup::floor(std::uint32_t job) const noexcept {
  return least(job, [](const JobState& state) { return state.clocks.floor(); }).value_or(0);
}

std::uint32_t ArcGroup::applied(std::uint32_t job) const noexcept {
  return least(job, [](const JobState& state) { return state.applied; }).value_or(0);
}

std::uint32_t ArcGroup::last_applied(std::uint32_t job) const noexcept {
  std::uint32_t greatest = 0;
  for (const auto& arc : arcs_) {
    const JobState* const state = arc->jobs().find(job);
    greatest = state == nullptr ? greatest : std::max(greatest, state->applied);
  }
  return greatest;
}

bool ArcGroup::is_complete(std::uint32_t job, std::uint32_t clock) const noexcept {
  return std::ranges::all_of(arcs_, [&](const auto& arc) {
    const JobState* const state = arc->jobs().find(job);
    return state != nullptr && state->is_complete(clock);
  });
}

std::size_t ArcGroup::pending_bytes(std::uint32_t job) const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    const JobState* const state = arc->jobs().find(job);
    bytes += state == nullptr ? 0 : state->pending.bytes();
  }
  return bytes;
}

std::size_t ArcGroup::pending_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    for (const auto& job : arc->jobs().all()) {
      bytes += job->pending.bytes();
    }
  }
  return bytes;
}

std::size_t ArcGroup::next_bytes(std::uint32_t job) const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    const JobState* const state = arc->jobs().find(job);
    bytes += state == nullptr ? 0 : state->pending.bytes(state->applied);
  }
  return bytes;
}

std::uint32_t ArcGroup::applied_sum(std::span<const SlotRange> ranges) const noexcept {
  std::uint32_t sum = 0;
  for (const SlotRange& range : ranges) {
    if (const Arc* const arc = arc_of(range.first); arc != nullptr) {
      for (const auto& job : arc->jobs().all()) {
        sum += job->applied;
      }
    }
  }
  return sum;
}

bool ArcGroup::try_step(Arc& arc, std::size_t job, std::uint64_t& failures) noexcept {
  try {
    arc.apply(StepOp{.job = job});
    return true;
  } catch (const std::exception&) {
    ++failures;  // the step stays pending, and the next message retries it
    return false;
  }
}

}  // namespace shoal
