// JobState: a job in an arc: its consistency, its workers' clocks, what they have written, and the pushes
// that wait for the end of a clock. Each job has a vector clock of its own: the clocks of one job neither
// wait for another job nor release anything of it. Two jobs have the same ranks.
//
// A table's own clock, by which rows age, goes on from where it is when a named job begins. `origins` has,
// for each table that existed then, the table's clock at clock 0 of the job; a later table begins with the
// job's clock. The default job's is kept by the shard (Shard::set_clock).
//
// Invariants
//   I1  In BSP applied <= clocks.floor(), and nothing is kept for a clock below applied.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/byte_stream.h"
#include "base/mix.h"
#include "replica/clocks.h"
#include "replica/dedup_window.h"
#include "replica/pending_pushes.h"
#include "replica/slot_range.h"
#include "replica/worker_id.h"

namespace shoal {

struct JobState {
  std::uint32_t number = 0;  // 0: none has begun
  bool is_named = false;
  Mode mode = Mode::kBsp;
  std::uint32_t staleness = 0;
  bool mean = false;
  Clocks clocks{};
  std::uint32_t applied = 0;
  std::vector<std::unique_ptr<DedupWindow>> dedup{};  // by rank, from its first write on
  std::vector<std::vector<std::uint32_t>>
      tick_tables{};  // by rank: the tables that its last tick named, under BSP
  PendingPushes pending{};
  std::map<std::uint32_t, std::uint32_t> origins{};  // by table

  // Whether a read at this clock sees all that it must see.
  bool is_complete(std::uint32_t clock) const noexcept;
  // Whether a clock has ended that is not applied.
  bool has_step() const noexcept { return mode == Mode::kBsp && applied < clocks.floor(); }
  // Whether both have the same workers; their clocks may differ.
  bool agrees_with(const JobState& other) const noexcept;
  std::uint32_t origin(std::uint32_t table) const noexcept {
    const auto found = origins.find(table);
    return found == origins.end() ? 0 : found->second;
  }

  void save(ByteWriter& out) const;
  // Replaces what save() writes. `dims` as in PendingPushes::restore().
  void restore(ByteReader& in, Slots slots, const SlotRange& range,
               const std::map<std::uint32_t, std::size_t>& dims);
};

}  // namespace shoal
