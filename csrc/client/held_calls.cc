#include "client/held_calls.h"

#include <algorithm>

namespace shoal::client {

std::vector<CallPtr> HeldCalls::calls() const {
  std::vector<CallPtr> calls;
  for (const auto& [serial, call] : held_) {
    calls.push_back(call);
  }
  return calls;
}

const Call* HeldCalls::blocker(const Call& call) const noexcept {
  return call.waits_for_.empty() ? nullptr : call.waits_for_.front();
}

std::size_t HeldCalls::holds_of(std::uint32_t clock) const noexcept {
  const auto found = by_clock_.find(clock);
  return found == by_clock_.end() ? 0 : found->second;
}

void HeldCalls::hold(const CallPtr& call, std::vector<Call*> after) {
  for (Call* const other : after) {
    if (std::ranges::find(call->waits_for_, other) == call->waits_for_.end()) {
      call->waits_for_.push_back(other);
      other->followers_.push_back(call.get());
    }
  }
  call->is_held_ = true;
  held_.emplace(call->serial, call);
  ++by_clock_[call->clock];
}

CallPtr HeldCalls::release(Call& call) {
  const auto found = held_.find(call.serial);
  CallPtr released = std::move(found->second);
  held_.erase(found);
  call.is_held_ = false;
  if (--by_clock_[call.clock] == 0) {
    by_clock_.erase(call.clock);
  }
  for (Call* const other : call.waits_for_) {
    std::erase(other->followers_, &call);
  }
  call.waits_for_.clear();
  return released;
}

void HeldCalls::settled(Call& call) {
  for (Call* const follower : call.followers_) {
    std::erase(follower->waits_for_, &call);
    if (call.failure.has_value()) {
      due_.push_back({follower->serial, call.shared_from_this()});
    } else if (follower->waits_for_.empty()) {
      due_.push_back({follower->serial, nullptr});
    }
  }
  call.followers_.clear();
}

std::optional<std::pair<CallPtr, const Call*>> HeldCalls::take_due() {
  while (!due_.empty()) {
    const Due due = std::move(due_.front());
    due_.pop_front();
    const auto found = held_.find(due.serial);
    if (found != held_.end()) {
      failed_ = due.failed;
      return std::pair(found->second, failed_.get());
    }
  }
  return std::nullopt;
}

}  // namespace shoal::client
