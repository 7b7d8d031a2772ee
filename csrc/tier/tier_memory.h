// TierMemory: memory that the tiers of a process share: each has a part in proportion to the bytes of its
// rows and slots. A tier that joins takes from the others, who evict rows when they are used next.
//
// Threads: any number.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shoal {

class TierMemory {
 public:
  explicit TierMemory(std::size_t bytes) noexcept : bytes_(bytes) {}

  std::size_t bytes() const noexcept { return bytes_; }

  // One tier's part, which it gives back when it is destroyed.
  class Part {
   public:
    Part(TierMemory& memory, std::size_t weight) noexcept : memory_(memory), weight_(weight) {
      memory_.weights_.fetch_add(weight);
    }
    ~Part() { memory_.weights_.fetch_sub(weight_); }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    std::size_t bytes() const noexcept {
      const double share = static_cast<double>(weight_) / static_cast<double>(memory_.weights_.load());
      return static_cast<std::size_t>(static_cast<double>(memory_.bytes_) * share);
    }

   private:
    TierMemory& memory_;
    std::size_t weight_;
  };

 private:
  std::size_t bytes_;
  std::atomic<std::size_t> weights_{0};
};

}  // namespace shoal
