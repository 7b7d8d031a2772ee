// ByteBudget: the memory that all requests in progress may use together.
//
// The server adds the bytes of bodies as they arrive, and whoever decodes a body adds what that takes, before
// it is allocated. What does not fit is refused, and nothing is added.
//
// Invariants
//   I1  0 <= held() <= limit().
//
// Threads: any.

#pragma once

#include <atomic>
#include <cstdint>

namespace shoal {

class ByteBudget {
 public:
  explicit ByteBudget(std::uint64_t limit) noexcept : limit_(limit) {}

  std::uint64_t limit() const noexcept { return limit_; }
  std::uint64_t held() const noexcept { return held_.load(std::memory_order_relaxed); }

  // False, and nothing is added, if the bytes do not fit.
  bool add(std::uint64_t bytes) noexcept {
    std::uint64_t before = held();
    do {
      if (bytes > limit_ - before) {
        return false;
      }
    } while (!held_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
    return true;
  }
  // Of bytes that were added.
  void give_back(std::uint64_t bytes) noexcept { held_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  const std::uint64_t limit_;
  std::atomic<std::uint64_t> held_{0};
};

}  // namespace shoal
