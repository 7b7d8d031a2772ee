// Budget: the memory that the tables of one store may take together, a share of it for each slot.
//
// Idea. All state is per slot, so the bound is: what the tables keep of slot s (index, rows, waiting keys) is never more
// than the budget's share of a slot. So who meets it first does not depend on threads, nor on who else holds slots.
//
// What is changed under a budget is changed by one call at a time: turn() is held from the first look to the last byte.
// Memory is only taken where spare() says that it is there, and noted as it is taken or given back.
//
// Threads: used() and note() of one slot by one thread at a time, which has, or works for one that has, the turn.

#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/mix.h"

namespace shoal {

// Nothing was changed by the call that throws it.
struct MemoryBudgetExceededError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Budget {
 public:
  static constexpr std::size_t kMinShare = 1024;

  Budget(Slots slots, std::uint64_t bytes) : share_(bytes / slots.count()), used_(slots.count()) {
    SHOAL_CHECK(share_ >= kMinShare,
                "a memory budget needs at least " + std::to_string(kMinShare * slots.count()) +
                    " bytes for " + std::to_string(slots.count()) + " slots, got " + std::to_string(bytes) +
                    ": raise it, or make the store with fewer slots");
  }

  std::mutex& mutex() noexcept { return turn_; }
  std::size_t share() const noexcept { return share_; }
  std::size_t slots() const noexcept { return used_.size(); }
  std::size_t used(std::size_t slot) const noexcept { return used_[slot]; }
  std::size_t spare(std::size_t slot) const noexcept {
    return used_[slot] < share_ ? share_ - used_[slot] : 0;
  }
  void note(std::size_t slot, std::size_t before, std::size_t now) noexcept { used_[slot] += now - before; }

 private:
  std::mutex turn_;
  std::size_t share_;
  std::vector<std::size_t> used_;
};

}  // namespace shoal
