// ChangeLog: what a shard records of its changes for saves: their previous contents while a snapshot is in
// progress (copy-on-write, shard/snapshot.h), and since the last save and export the ranges of hashes that
// have changed (table/dirty_ranges.h), from which the next may be a delta.
//
// Invariants
//   I1  Whoever changes rows of a slot calls before_change() first, under the slot's lock.
//   I2  A snapshot for which memory runs out is lost. The change is not.
//
// Threads: any. Its mutex is the last in the lock order. Slots are given locked, but to those functions that
// lock all of them one after the other: track(), begin_base(), end_base() without a slot. wait() is called
// without locks of slots and without a turn.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "shard/owner_process.h"
#include "shard/slot_state.h"

namespace shoal {

class ChangeLog {
 public:
  static constexpr std::size_t kHopeless = 4;
  static constexpr std::chrono::milliseconds kPatience{50};

  // Of slots with rows of `row_bytes`, which must outlive this object. `may_wait`: false: callers hold the
  // lock of all slots.
  ChangeLog(const SlotStates& states, Slots slots, std::size_t row_bytes, bool may_wait)
      : states_(states), slots_(slots), row_bytes_(row_bytes), may_wait_(may_wait) {}

  // is_saving(): a snapshot is in progress, and is not lost. fits(): whether `rows` rows can be changed
  // within the memory for logged contents. Where callers may not wait, changes go on if it is exceeded; the
  // save fails if much more has to be logged.
  bool has_snapshot() const noexcept { return active_.load(); }
  bool is_saving() const noexcept { return active_.load() && !lost_.load(); }
  bool fits(std::size_t rows) const noexcept;
  // Waits until `rows` rows may be changed.
  void wait(std::size_t rows) {
    if (active_.load(std::memory_order_relaxed)) [[unlikely]] {
      wait_for_slots(rows);
    }
  }

  // Logs the previous contents of the rows of these hashes, each once, and of their admission state.
  void before_change(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept {
    if (slot.watched) [[unlikely]] {
      log(slot, hashes);
    }
  }
  void before_change_of_all(SlotState& slot) noexcept;

  // Name of the save or export that the next delta can be based on; "" if there is none: it has to be one of
  // all rows.
  std::string base(Purpose purpose = Purpose::kSave) const;
  void set_base(std::string name, Purpose purpose = Purpose::kSave);
  // Records changes from now on, as if the rows had just been saved as `base`. Requires exclusive use of the
  // shard.
  void track(std::string base);
  // What a save of a base or a delta does to the recorded changes, where it was executed elsewhere: the rows
  // of the moment are being saved; they are saved under this name; or the save has failed. Like a save, not
  // during another one.
  void begin_base() { begin_base(Purpose::kSave, new_ranges()); }
  void end_base(std::optional<std::string> name);

  void adopt() noexcept { owner_ = OwnerProcess(); }  // Shard::adopt_after_fork()

  // --- of a snapshot ---------------------------------------------------------------------------------------

  // One for each slot.
  std::vector<std::unique_ptr<DirtyRanges>> new_ranges() const;
  void begin_base(Purpose purpose, std::vector<std::unique_ptr<DirtyRanges>> ranges) noexcept;
  static void end_base(SlotState& slot, Purpose purpose, bool is_base) noexcept;
  // `limit`: of the logged bytes at which changes wait.
  void begin_snapshot(std::size_t limit) noexcept;
  // A slot was copied, and logs nothing any more; its logged contents were freed.
  void slot_taken() noexcept { slots_left_.fetch_sub(1); }
  void slot_saved(std::size_t logged) noexcept;
  void end_snapshot() noexcept;
  bool is_lost() const noexcept { return lost_.load(); }
  void set_lost() noexcept { lost_ = true; }
  std::size_t logged() const noexcept { return logged_.load(); }

 private:
  void log(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept;
  void wait_for_slots(std::size_t rows);

  const SlotStates& states_;
  Slots slots_;
  std::size_t row_bytes_;
  bool may_wait_;
  std::atomic<bool> active_{false};
  std::atomic<bool> lost_{false};           // memory for logging ran out: the save fails
  std::atomic<std::size_t> slots_left_{0};  // not yet taken
  std::atomic<std::size_t> logged_{0};      // bytes
  std::atomic<std::size_t> limit_{0};       // of logged_
  OwnerProcess owner_;
  mutable Mutex mutex_;
  CondVar slot_saved_;  // signals that a slot was saved or the snapshot ended
  std::array<std::string, kPurposes> bases_ GUARDED_BY(mutex_);
};

}  // namespace shoal
