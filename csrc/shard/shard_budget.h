// ShardBudget: the part of a memory budget (policy/budget.h) that a shard's slots use. Without a budget
// nothing is limited or recorded.
//
// Invariants
//   I1  Of each slot the bytes that were last noted are recorded in the budget, and no others of this shard.
//   I2  A slot is not enlarged beyond allowed().
//
// Threads: calls that change tables hold lock() throughout, so they run one at a time; of a slot that is
// noted the caller has the lock, too. Fork: the copy in a child is destroyed silently.

#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "policy/budget.h"
#include "shard/owner_process.h"
#include "shard/slot_state.h"

namespace shoal {

class ShardBudget {
 public:
  // Of the slots from number `first` on, which must outlive this object. Throws MemoryBudgetExceededError if
  // they do not fit although they are empty.
  ShardBudget(Budget* budget, const SlotStates& slots, std::size_t first);
  ~ShardBudget();
  ShardBudget(const ShardBudget&) = delete;
  ShardBudget& operator=(const ShardBudget&) = delete;

  bool is_limited() const noexcept { return budget_ != nullptr; }
  // Empty if there is no budget.
  std::unique_lock<std::mutex> lock() const;
  // Bytes that a slot, given by its place, may use. There is a budget; likewise below.
  std::size_t allowed(std::size_t place) const noexcept;
  std::size_t share() const noexcept { return budget_->share(); }  // of a slot, for all tables
  // Records the present bytes of a slot.
  void note(std::size_t place) noexcept;
  // Throws MemoryBudgetExceededError if a slot may not have so many bytes, after `rows` rows more.
  void check(std::size_t place, std::size_t bytes, std::size_t rows) const {
    if (budget_ != nullptr && bytes > allowed(place)) {
      throw_over(place, rows);
    }
  }
  [[noreturn]] void throw_over(std::size_t place, std::size_t rows) const;
  void adopt() noexcept { owner_ = OwnerProcess(); }  // Shard::adopt_after_fork()
  // Frees what is recorded; nothing is to be noted after it.
  void leave();

 private:
  Budget* budget_;
  const SlotStates& slots_;
  std::size_t first_;
  std::vector<std::size_t> noted_;  // bytes of each slot
  OwnerProcess owner_;
};

}  // namespace shoal
