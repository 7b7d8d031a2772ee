// RowCreator: creates the missing rows of a part of a batch, as far as the table's admission rule admits
// their keys, with room in the slots' tables made ahead of the inserts.
//
// A slot where more than one row in kFewMissing is missing is filling: in the next batch its missing rows are
// created before the probe, because inserting moves rows, and every run already probed would have to be
// probed again.
//
// Threads: one owner. The slots are locked.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "policy/admission.h"
#include "shard/slot_state.h"
#include "shard/table_spec.h"
#include "table/probe.h"

namespace shoal {

struct ShardCore;

// How a call inserts.
struct InsertTerms {
  PushTime now = {};
  bool asks = false;                           // whether a key must be admitted
  std::span<const std::uint32_t> counts = {};  // occurrences of the batch's keys; empty: 1 each
};

class RowCreator {
 public:
  RowCreator(const ShardCore& core, const SlotSlices& batch, const InsertTerms& terms) noexcept
      : core_(core), batch_(batch), terms_(terms) {}

  const InsertTerms& terms() const noexcept { return terms_; }
  // Inserts the missing rows of a run that begins at `first`. Returns their number.
  std::size_t create(Probe& run, std::size_t first);
  // Inserts the missing rows of all hashes of a slot in the batch.
  std::size_t create_all(SlotState& slot, std::span<const std::uint64_t> hashes);
  // Occurrences that were not admitted since the last call.
  std::uint64_t take_refused() noexcept { return std::exchange(refused_, 0); }

 private:
  static constexpr std::size_t kFewMissing = 16;

  std::size_t insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                             std::span<std::byte*> rows) const;
  // Asks the slot's admission filter about the missing rows among `rows`, which belong to the batch's hashes
  // from number `first` on, all of that slot, and inserts the admitted ones. Returns their number.
  std::size_t admit(SlotState& slot, std::span<std::byte*> rows, std::size_t first);
  // Makes room for `missing` rows and for the missing ones among the slot's hashes from `next` on. If
  // ascending hashes were inserted into a table that grows in small steps, they would all collide at its
  // front. Counted once per batch.
  void make_room(SlotTable& table, std::size_t missing, std::size_t next);

  const ShardCore& core_;
  const SlotSlices& batch_;
  InsertTerms terms_;
  const SlotTable* counted_ = nullptr;  // the last table whose missing rows were counted
  std::vector<std::byte*> rows_;        // scratch
  std::uint64_t refused_ = 0;           // occurrences
  const SlotState* slot_ = nullptr;     // where keys were last asked about, and how many of them
  std::size_t asked_ = 0;
  std::size_t admitted_ = 0;
};

}  // namespace shoal
