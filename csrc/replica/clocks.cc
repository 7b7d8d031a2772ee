// Vector clock with a minimum. The incarnation is an epoch number of the rank: it increases whenever the rank
// is taken over, so that late messages of the previous one are recognized and refused. A fenced worker is
// refused too, but the others still wait for it; a dismissed one delays no other worker.

#include "replica/clocks.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace shoal {

void Clocks::clear() { *this = Clocks(); }

Clocks::WorkerState Clocks::state(std::uint32_t rank, std::uint32_t incarnation) const noexcept {
  if (rank >= workers_.size() || incarnation > workers_[rank].incarnation) {
    return WorkerState::kUnknown;
  }
  const Worker& worker = workers_[rank];
  const bool serves = incarnation == worker.incarnation && worker.admitted && !worker.fenced;
  return serves ? WorkerState::kAdmitted : WorkerState::kFenced;
}

void Clocks::check(std::uint32_t rank, std::uint32_t incarnation) {
  SHOAL_CHECK(rank < kMaxWorkers,
              "there is no rank " + std::to_string(rank) + ": a job has at most 65536 workers");
  SHOAL_CHECK(incarnation != 0, "rank " + std::to_string(rank) + " has incarnation 0: the first is 1");
}

bool Clocks::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) {
  check(rank, incarnation);
  if (rank >= workers_.size()) {
    workers_.resize(rank + std::size_t{1});
  }
  hold_.reset();
  Worker& worker = workers_[rank];
  const bool fresh = incarnation > worker.incarnation;
  if (fresh) {
    admitted_ += worker.admitted ? 0 : 1;
    worker = {.incarnation = incarnation, .clock = clock, .admitted = true};
  }
  update();
  return fresh;
}

bool Clocks::fence(std::uint32_t rank, std::uint32_t incarnation) {
  check(rank, incarnation);
  const bool inside =
      rank < workers_.size() && workers_[rank].admitted && workers_[rank].incarnation == incarnation;
  if (inside) {
    workers_[rank].fenced = true;
  }
  return inside;
}

bool Clocks::dismiss(std::uint32_t rank, std::uint32_t incarnation) {
  check(rank, incarnation);
  if (rank >= workers_.size()) {
    workers_.resize(rank + std::size_t{1});
  }
  Worker& worker = workers_[rank];
  if (incarnation < worker.incarnation) {
    return false;
  }
  const bool leaves = worker.admitted;
  worker.incarnation = incarnation;
  worker.admitted = false;
  worker.fenced = false;
  admitted_ -= leaves ? 1 : 0;
  update();
  return leaves;
}

bool Clocks::agrees_with(const Clocks& other) const noexcept {
  const std::size_t ranks = std::max(workers_.size(), other.workers_.size());
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const Worker worker = rank < workers_.size() ? workers_[rank] : Worker{};
    const Worker known_there = rank < other.workers_.size() ? other.workers_[rank] : Worker{};
    if (worker.incarnation != known_there.incarnation || worker.admitted != known_there.admitted ||
        worker.fenced != known_there.fenced) {
      return false;
    }
  }
  return true;
}

void Clocks::save(ByteWriter& out) const {
  out.put(greatest_);
  out.put(static_cast<std::uint8_t>(hold_ ? 1 : 0));
  out.put(hold_.value_or(0));
  std::size_t ranks = workers_.size();
  while (ranks != 0 && workers_[ranks - 1].incarnation == 0) {
    --ranks;
  }
  out.put(static_cast<std::uint32_t>(ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const Worker& worker = workers_[rank];
    out.put(worker.incarnation);
    out.put(worker.clock);
    out.put(static_cast<std::uint8_t>((worker.admitted ? 1 : 0) | (worker.fenced ? 2 : 0)));
  }
}

Clocks Clocks::restore(ByteReader& in) {
  constexpr const char* kField = "clocks";
  Clocks made;
  made.greatest_ = in.take<std::uint32_t>(kField);
  const bool is_held = in.take_flag(kField);
  const auto hold = in.take<std::uint32_t>(kField);
  made.hold_ = is_held ? std::optional(hold) : std::nullopt;
  const auto ranks = in.take_between<std::uint32_t>("workers", 0, kMaxWorkers);
  in.check(ranks <= in.left(), "workers", "are not all there");
  made.workers_.resize(ranks);
  for (Worker& worker : made.workers_) {
    worker.incarnation = in.take<std::uint32_t>(kField);
    worker.clock = in.take<std::uint32_t>(kField);
    const auto flags = in.take_between<std::uint8_t>(kField, 0, 3);
    worker.admitted = (flags & 1U) != 0;
    worker.fenced = (flags & 2U) != 0;
    in.check(!worker.admitted || (worker.incarnation != 0 && worker.clock <= made.greatest_), kField,
             "do not fit together");
    made.admitted_ += worker.admitted ? 1 : 0;
  }
  made.update();
  return made;
}

void Clocks::tick(std::uint32_t rank) noexcept {
  const bool was_slowest = workers_[rank].clock == slowest_;
  ++workers_[rank].clock;
  if (was_slowest) {
    update();
  } else {
    greatest_ = std::max(greatest_, workers_[rank].clock);
  }
}

std::uint32_t Clocks::hold() noexcept {
  if (!hold_) {
    hold_ = greatest_;
    update();
  }
  return *hold_;
}

void Clocks::resume() noexcept {
  hold_.reset();
  update();
}

void Clocks::update() noexcept {
  std::uint32_t least = ~std::uint32_t{0};
  for (const Worker& worker : workers_) {
    if (worker.admitted) {
      least = std::min(least, worker.clock);
      greatest_ = std::max(greatest_, worker.clock);
    }
  }
  slowest_ = admitted_ == 0 ? greatest_ : least;
  floor_ = hold_ ? std::min(slowest_, *hold_) : slowest_;
}

}  // namespace shoal
