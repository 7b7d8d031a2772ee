// Budget: the memory limit of all tables of one store, divided equally among the slots; or the part of a
// range of slots.
//
// All state belongs to a slot, so the limit is enforced per slot: what the tables hold of slot s (index,
// rows, waiting keys) never exceeds the slot's share. Whether a call exceeds it therefore does not depend on
// threads, nor on which process holds the other slots.
//
// Under a budget, calls that change tables run one at a time: each holds mutex() from its first check to its
// last allocation. Memory is allocated only if spare() allows it, and recorded by note() when it is allocated
// or released.
//
// Threads: used() and note() of one slot are called by one thread at a time, on behalf of the call that holds
// mutex().

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/mix.h"

namespace shoal {

// The call that throws it has changed nothing.
struct MemoryBudgetExceededError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Budget {
 public:
  static constexpr std::uint64_t kMinShare = 1024;
  static constexpr std::uint64_t kMaxShare = std::uint64_t{1} << 48U;  // more than any machine has

  // Of the slots [first, end), or of all; `bytes` are for all slots of the store.
  Budget(Slots slots, std::uint64_t bytes, std::size_t first = 0,
         std::size_t end = std::numeric_limits<std::size_t>::max())
      : share_(bytes / slots.count()),
        slots_(slots.count()),
        first_(first),
        used_(std::min(end, slots.count()) - first) {
    SHOAL_CHECK(share_ >= kMinShare,
                "a memory budget needs at least " + std::to_string(kMinShare * slots.count()) +
                    " bytes for " + std::to_string(slots.count()) + " slots, got " + std::to_string(bytes) +
                    ": raise it, or make the store with fewer slots");
    check_share(share_);
  }

  // std::invalid_argument: a slot's bytes are more than any machine has.
  static void check_share(std::uint64_t bytes) {
    SHOAL_CHECK(bytes <= kMaxShare, "a memory budget of " + std::to_string(bytes) +
                                        " bytes for each slot is beyond any machine: the most is " +
                                        std::to_string(kMaxShare));
  }

  std::mutex& mutex() noexcept { return mutex_; }
  std::size_t share() const noexcept { return share_; }
  std::size_t slots() const noexcept { return slots_; }  // of the store
  std::size_t used(std::size_t slot) const noexcept { return used_[slot - first_]; }
  std::size_t spare(std::size_t slot) const noexcept { return used(slot) < share_ ? share_ - used(slot) : 0; }
  void note(std::size_t slot, std::size_t before, std::size_t now) noexcept {
    used_[slot - first_] += now - before;
  }

 private:
  std::mutex mutex_;
  std::size_t share_;
  std::size_t slots_;
  std::size_t first_;
  std::vector<std::size_t> used_;
};

}  // namespace shoal
