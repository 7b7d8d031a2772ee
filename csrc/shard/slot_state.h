// SlotState: a slot of a shard: its table, its admission filter, and what is recorded of its changes for
// saves.
//
// Invariants
//   I1  watched: pre_images is not null, or changed ranges are recorded (is_followed()).
//   I2  The first cache lines hold what a batch needs: a batch brings a few dozen hashes to a slot that is
//       not cached.
//
// Threads: whoever reads or changes a slot holds its lock, shared or alone.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "policy/admission.h"
#include "table/dirty_ranges.h"
#include "table/pre_image_log.h"
#include "table/slot_table.h"

namespace shoal {

// A slot's table and its lock, its own or the one of all slots.
struct alignas(kCacheLine) SlotState {
  SlotState(const Layout& layout, Slot slot, Chunks& chunks, std::shared_mutex* common_lock)
      : lock(common_lock != nullptr ? *common_lock : own), table(layout, slot, chunks) {}
  // The first cache line holds what a batch needs that only updates rows, the second the addresses of wide
  // rows.
  std::shared_mutex& lock;
  bool fills = false;    // many rows of the last batch were missing
  bool watched = false;  // changes must be logged first (shard/snapshot.h)
  SlotTable table;
  std::unique_ptr<AdmissionFilter> filter;  // null if the table admits all keys
  std::unique_ptr<PreImageLog> pre_images;  // non-null until a save takes the slot
  std::size_t logged = 0;                   // bytes of previous contents at the last change
  // Changes since the save and the export that are the bases of deltas; null if there is none. While the next
  // one is in progress, `then` holds the changes before its moment. Admission filters are saved, not
  // exported.
  struct Since {
    std::unique_ptr<DirtyRanges> now;
    std::unique_ptr<DirtyRanges> then;
  };
  std::array<Since, kPurposes> changed;
  bool filter_changed = false;
  bool filter_changed_then = false;

  Since& since(Purpose purpose) noexcept { return changed[static_cast<std::size_t>(purpose)]; }
  const Since& since(Purpose purpose) const noexcept { return changed[static_cast<std::size_t>(purpose)]; }
  bool is_followed() const noexcept {
    return std::ranges::any_of(changed, [](const Since& since) { return since.now != nullptr; });
  }
  // Of the table with its rows and waiting keys.
  std::size_t bytes() const noexcept {
    return sizeof(SlotState) + table.bytes() +
           (filter == nullptr ? 0 : sizeof(AdmissionFilter) + filter->bytes());
  }
  alignas(kCacheLine) std::shared_mutex own;
};

// One per slot of a shard, in ascending order: a slot is given by its place in this list.
using SlotStates = std::vector<std::unique_ptr<SlotState>>;

}  // namespace shoal
