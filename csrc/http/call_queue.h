// CallQueue: requests that wait for threads which are not the server's own.
//
// Three lanes, so that no request waits for one of another kind: predictions, which compute; reads (GET),
// which return at once; and changes, which may take minutes. Each lane is taken in order of arrival.
//
//   add() -> take() -> [the request is answered] -> taken_back(id)
//
// Invariants
//   I1  At most `most` calls wait in a lane.
//   I2  Each call that was taken has a number of its own, until it is taken back.
//
// Threads: any.

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/mutex.h"
#include "http/message.h"

namespace shoal {

enum class HttpLane : std::uint8_t { kPrediction, kRead, kChange };

class CallQueue {
 public:
  struct Taken {
    std::uint64_t id;
    std::shared_ptr<HttpCall> call;
  };

  explicit CallQueue(std::size_t most) : most_(most) {}

  // False if the lane is full, or closed: then the call is not kept.
  bool add(HttpLane lane, std::shared_ptr<HttpCall> call);
  // Waits for a call until `end`. None: there was none, or the queue is closed.
  std::optional<Taken> take(HttpLane lane, std::chrono::steady_clock::time_point end);
  // Null if no call of this number was taken.
  std::shared_ptr<HttpCall> taken_back(std::uint64_t id);
  // Ends all waiting: calls that wait are dropped, further ones are refused.
  void close();
  bool closed() const;
  std::size_t waiting() const;

 private:
  struct Lane {
    std::deque<std::shared_ptr<HttpCall>> calls;
    CondVar changed;
  };

  const std::size_t most_;
  mutable Mutex mutex_;
  std::array<Lane, 3> lanes_ GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, std::shared_ptr<HttpCall>> taken_ GUARDED_BY(mutex_);
  std::uint64_t next_id_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace shoal
