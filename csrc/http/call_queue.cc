#include "http/call_queue.h"

#include <utility>

namespace shoal {

bool CallQueue::add(HttpLane lane, std::shared_ptr<HttpCall> call) {
  const MutexLock lock(mutex_);
  Lane& one = lanes_[static_cast<std::size_t>(lane)];
  if (closed_ || one.calls.size() >= most_) {
    return false;
  }
  one.calls.push_back(std::move(call));
  one.changed.notify_one();
  return true;
}

std::optional<CallQueue::Taken> CallQueue::take(HttpLane lane, std::chrono::steady_clock::time_point end) {
  const MutexLock lock(mutex_);
  Lane& one = lanes_[static_cast<std::size_t>(lane)];
  while (!closed_ && one.calls.empty()) {
    if (std::chrono::steady_clock::now() >= end) {
      return std::nullopt;
    }
    one.changed.wait_until(mutex_, end);
  }
  if (closed_) {
    return std::nullopt;
  }
  const auto [found, added] = taken_.try_emplace(next_id_, one.calls.front());
  ++next_id_;
  one.calls.pop_front();
  return Taken{found->first, found->second};
}

std::shared_ptr<HttpCall> CallQueue::taken_back(std::uint64_t id) {
  const MutexLock lock(mutex_);
  const auto found = taken_.find(id);
  if (found == taken_.end()) {
    return nullptr;
  }
  auto call = std::move(found->second);
  taken_.erase(found);
  return call;
}

void CallQueue::close() {
  std::array<std::deque<std::shared_ptr<HttpCall>>, 3> dropped;  // after the lock
  const MutexLock lock(mutex_);
  closed_ = true;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    dropped[i].swap(lanes_[i].calls);
    lanes_[i].changed.notify_all();
  }
}

bool CallQueue::closed() const {
  const MutexLock lock(mutex_);
  return closed_;
}

std::size_t CallQueue::waiting() const {
  const MutexLock lock(mutex_);
  std::size_t sum = 0;
  for (const Lane& lane : lanes_) {
    sum += lane.calls.size();
  }
  return sum;
}

}  // namespace shoal
