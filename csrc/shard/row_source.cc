// A Shard's turns: calls whose rows are not all in memory. Without a source there are none.

#include "shard/row_source.h"

#include "shard/shard.h"

namespace shoal {

Shard::Turn Shard::turn() const {
  if (source_ == nullptr) {
    return {};
  }
  check_process();  // in a child the parent may have the turn
  return Turn(*source_);
}

bool Shard::prefetch(const SlotSlices& batch, RowLocations* locations) const {
  if (source_ == nullptr) {
    if (locations != nullptr) {
      locate(batch, *locations);
    }
    return false;
  }
  check_batch(batch);
  const Turn turn = this->turn();
  source_->prefetch(batch, locations);
  return true;
}

void Shard::with_slots(std::size_t first, std::size_t end, bool changes,
                       const std::function<bool(std::size_t, std::size_t)>& use) const {
  if (source_ == nullptr) {
    use(first, end);
    return;
  }
  bool goes_on = true;
  for (std::size_t s = first; s < end && goes_on; ++s) {
    const SlotState& slot = at(Slot{static_cast<std::uint32_t>(s)});
    Turn turn = this->turn();
    if (changes && is_saving()) {
      const std::size_t rows = slot.table.size() + rows_elsewhere(s - first_);
      turn.unlock();
      wait_for_save(rows);
      turn.lock();
    }
    source_->with_slot(s - first_, changes, [&] { goes_on = use(s, s + 1); });
  }
}

std::optional<TierStats> Shard::tier_stats() const {
  const Turn turn = this->turn();
  return source_ == nullptr ? std::nullopt : std::optional(source_->stats());
}

}  // namespace shoal
