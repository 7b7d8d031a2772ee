// Room for the rows of a batch: under a memory budget, and under a rule that limits the rows of a slot. Both
// evict other rows.
//
// Threads: called by a call that changes rows, before and after its pass (shard/shard_core.h:
// begin_writing()).

#pragma once

#include <cstdint>

#include "shard/row_creator.h"
#include "shard/shard_core.h"

namespace shoal {

// Makes room for all rows and waiting keys that the batch may need, evicting others if necessary. Throws
// MemoryBudgetExceededError, with nothing changed, if they do not fit. Nothing without a budget.
void make_room(ShardCore& core, const SlotSlices& batch, const InsertTerms& terms);

// Evicts rows of the batch's slots that have more than a MaxRows rule allows.
void enforce_max_rows(ShardCore& core, const SlotSlices& batch, std::uint32_t now);

}  // namespace shoal
