// Service: what replication needs of it.

#include <utility>

#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

void Service::track_executed(bool tracks) {
  const std::lock_guard lock(mutex_);
  tracks_ = tracks;
  if (tracks) {
    executed_.arcs.reserve(arcs_.size());
  } else {
    executed_ = {};
    released_writes_.clear();
  }
}

std::vector<Service::ReleasedWrite> Service::take_released() {
  const std::lock_guard lock(mutex_);
  return std::exchange(released_writes_, {});
}

wire::Status Service::replay(std::span<const wire::Frame> frames, std::size_t end_slot) noexcept {
  const std::lock_guard lock(mutex_);
  replay_end_ = end_slot;
  execute({}, frames, replayed_, nullptr, 0);
  replay_end_ = kNoReplay;
  replayed_.replies().clear();
  return executed_.status;
}

std::uint32_t Service::applied_sum(std::span<const SlotRange> arcs) const noexcept {
  const std::lock_guard lock(mutex_);
  std::uint32_t sum = 0;
  for (const SlotRange& range : arcs) {
    const Arc* const arc = arc_of(range.first);
    if (arc != nullptr) {
      for (const auto& job : arc->jobs()) {
        sum += job->applied;
      }
    }
  }
  return sum;
}

std::vector<SlotRange> Service::arcs() const {
  const std::lock_guard lock(mutex_);
  std::vector<SlotRange> ranges;
  for (const auto& arc : arcs_) {
    ranges.push_back({arc->first_slot(), arc->end_slot()});
  }
  return ranges;
}

}  // namespace shoal
