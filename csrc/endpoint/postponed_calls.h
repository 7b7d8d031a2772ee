// PostponedCalls: counts how often each call of a worker was told to retry later.
//
// Algorithm. A direct-mapped table of counters, by sequence number. The numbers of a worker's calls in flight
// span less than its size (replica/dedup_window.h).
//
// Threads: none of its own; one owner.

#pragma once

#include <array>
#include <cstdint>

#include "replica/dedup_window.h"

namespace shoal {

class PostponedCalls {
 public:
  // Counts one more postponement of the call; false once there were more than `most`.
  bool postpone(std::uint64_t number, std::uint32_t most) noexcept {
    Postponed& last = calls_[number % calls_.size()];
    last = {number, last.number == number ? last.times + 1 : 1};
    return last.times <= most;
  }

 private:
  struct Postponed {
    std::uint64_t number = 0;
    std::uint32_t times = 0;
  };

  std::array<Postponed, SequenceWindow::kSpan> calls_{};
};

}  // namespace shoal
