// A change waits for the moment of a snapshot, which ends with the pushes in progress, and for the copy of a
// slot; never for a disk. When the logged contents reach their limit, changes wait until slots are taken,
// each up to kPatience (those of a data loop are repeated by their senders instead, endpoint/writes.cc); at
// kHopeless times that, or without memory, the save fails, not the change.
//
// Deltas. A save may be the base of the next: from its moment on each slot records the ranges of its hashes
// that changed. The next save may contain only these ranges, with all rows that they hold at its moment. A
// save that does not complete changes nothing: earlier changes remain recorded. Exports have ranges of their
// own.

#include "shard/change_log.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace shoal {

void ChangeLog::log(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept {
  for (const SlotState::Since& since : slot.changed) {
    if (since.now != nullptr) {
      since.now->add(hashes, slot.table.size());
    }
  }
  slot.filter_changed |= slot.filter != nullptr && slot.since(Purpose::kSave).now != nullptr;
  if (slot.pre_images == nullptr || lost_.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    slot.pre_images->log_from(slot.table, hashes);
    if (slot.filter != nullptr) {
      std::vector<std::byte*> rows(hashes.size());
      slot.table.find(hashes, rows);
      std::vector<std::uint64_t> waiting;
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (rows[i] == nullptr) {
          waiting.push_back(hashes[i]);
        }
      }
      slot.filter->log(waiting);
    }
  } catch (const std::bad_alloc&) {
    lost_ = true;
  }
  const std::size_t logged =
      slot.pre_images->bytes() + (slot.filter == nullptr ? 0 : slot.filter->logged_bytes());
  logged_ += logged - std::exchange(slot.logged, logged);
}

void ChangeLog::before_change_of_all(SlotState& slot) noexcept {
  if (!slot.watched) [[likely]] {
    return;
  }
  std::array<std::uint64_t, 1024> hashes;
  std::size_t count = 0;
  const auto flush = [&] { log(slot, std::span(hashes).first(std::exchange(count, 0))); };
  slot.table.each_row([&](std::uint64_t hash, const std::byte*) {
    hashes[count] = hash;
    if (++count == hashes.size()) {
      flush();
    }
  });
  flush();
}

bool ChangeLog::fits(std::size_t rows) const noexcept {
  // For a change of all slots, counts the part in marked slots; half of the room suffices for any.
  const std::size_t piece = row_bytes_ + 2 * sizeof(std::uint64_t);
  const std::size_t needed = rows * piece / states_.size() * slots_left_.load();
  return !is_saving() || logged_.load() + std::min(needed, limit_.load() / 2) <= limit_.load();
}

void ChangeLog::wait_for_slots(std::size_t rows) {
  if (fits(rows)) {
    return;
  }
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const MutexLock lock(mutex_);
  while (may_wait_ && !fits(rows) && std::chrono::steady_clock::now() < end) {
    slot_saved_.wait_until(mutex_, end);
  }
  if (!(may_wait_ && fits(rows)) && logged_.load() > kHopeless * limit_.load()) {
    lost_ = true;
  }
}

std::string ChangeLog::base(Purpose purpose) const {
  const MutexLock lock(mutex_);
  return bases_[static_cast<std::size_t>(purpose)];
}

void ChangeLog::set_base(std::string name, Purpose purpose) {
  const MutexLock lock(mutex_);
  bases_[static_cast<std::size_t>(purpose)] = std::move(name);
}

void ChangeLog::track(std::string base) {
  owner_.check();
  for (const auto& slot : states_) {
    const std::unique_lock lock(slot->lock);
    slot->since(Purpose::kSave).now = std::make_unique<DirtyRanges>(slots_);
    slot->filter_changed = false;
    slot->watched = true;
  }
  set_base(std::move(base));
}

std::vector<std::unique_ptr<DirtyRanges>> ChangeLog::new_ranges() const {
  std::vector<std::unique_ptr<DirtyRanges>> ranges(states_.size());
  for (auto& of_slot : ranges) {
    of_slot = std::make_unique<DirtyRanges>(slots_);
  }
  return ranges;
}

void ChangeLog::begin_base(Purpose purpose, std::vector<std::unique_ptr<DirtyRanges>> ranges) noexcept {
  for (std::size_t s = 0; s < states_.size(); ++s) {
    SlotState& slot = *states_[s];
    const std::unique_lock lock(slot.lock);
    SlotState::Since& since = slot.since(purpose);
    since.then = std::exchange(since.now, std::move(ranges[s]));
    if (purpose == Purpose::kSave) {
      slot.filter_changed_then = std::exchange(slot.filter_changed, false);
    }
    slot.watched = true;
  }
}

void ChangeLog::end_base(SlotState& slot, Purpose purpose, bool is_base) noexcept {
  SlotState::Since& since = slot.since(purpose);
  if (!is_base) {  // the base is the one before, or none
    if (since.then != nullptr) {
      since.then->add(*since.now);
    }
    since.now = std::move(since.then);
    if (purpose == Purpose::kSave) {  // without a base nothing has changed since it
      slot.filter_changed = since.now != nullptr && (slot.filter_changed || slot.filter_changed_then);
    }
  }
  since.then.reset();
  slot.watched = slot.pre_images != nullptr || slot.is_followed();
}

void ChangeLog::end_base(std::optional<std::string> name) {
  for (const auto& slot : states_) {
    const std::unique_lock lock(slot->lock);
    end_base(*slot, Purpose::kSave, name.has_value());
  }
  if (name) {
    set_base(std::move(*name));
  }
}

void ChangeLog::begin_snapshot(std::size_t limit) noexcept {
  limit_ = limit;
  logged_ = 0;
  lost_ = false;
  slots_left_ = states_.size();
  active_ = true;
}

void ChangeLog::slot_saved(std::size_t logged) noexcept {
  {
    const MutexLock lock(mutex_);
    logged_.fetch_sub(logged);
  }
  slot_saved_.notify_all();
}

void ChangeLog::end_snapshot() noexcept {
  {
    const MutexLock lock(mutex_);
    active_ = false;
    logged_ = 0;
  }
  slot_saved_.notify_all();
}

}  // namespace shoal
