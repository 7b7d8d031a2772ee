#include "shard/shard_budget.h"

#include <string>
#include <utility>

namespace shoal {

ShardBudget::ShardBudget(Budget* budget, const SlotStates& slots, std::size_t first)
    : budget_(budget), slots_(slots), first_(first), noted_(budget == nullptr ? 0 : slots.size()) {
  const auto budget_lock = lock();
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    if (slots[s]->bytes() > budget->spare(first + s)) {
      throw MemoryBudgetExceededError(
          "the memory budget has no room for a new table, which takes " + std::to_string(slots[s]->bytes()) +
          " bytes of slot " + std::to_string(first + s) + " while it is empty: all tables take " +
          std::to_string(budget->used(first + s)) + " of the " + std::to_string(budget->share()) +
          " bytes that each of " + std::to_string(budget->slots()) +
          " slots has; give the store more memory, close a table, erase rows or sweep");
    }
  }
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    note(s);
  }
}

ShardBudget::~ShardBudget() {
  if (owner_.is_current()) {  // in a child the parent may hold the lock
    leave();
  }
}

std::unique_lock<std::mutex> ShardBudget::lock() const {
  return budget_ == nullptr ? std::unique_lock<std::mutex>() : std::unique_lock(budget_->mutex());
}

std::size_t ShardBudget::allowed(std::size_t place) const noexcept {
  return noted_[place] + budget_->spare(first_ + place);
}

void ShardBudget::note(std::size_t place) noexcept {
  if (budget_ != nullptr) {
    const std::size_t now = slots_[place]->bytes();
    budget_->note(first_ + place, noted_[place], now);
    noted_[place] = now;
  }
}

void ShardBudget::throw_over(std::size_t place, std::size_t rows) const {
  const std::size_t slot = first_ + place;
  throw MemoryBudgetExceededError(
      "the memory budget has no room for " + std::to_string(rows) + " more rows in slot " +
      std::to_string(slot) + ": all tables take " + std::to_string(budget_->used(slot)) + " of the " +
      std::to_string(budget_->share()) + " bytes that each of " + std::to_string(budget_->slots()) +
      " slots has; give the store more memory, or the table an expiry rule, or sweep");
}

void ShardBudget::leave() {
  const auto budget_lock = lock();
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    budget_->note(first_ + s, std::exchange(noted_[s], 0), 0);
  }
}

}  // namespace shoal
