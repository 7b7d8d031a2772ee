// replay(): executes a request that a primary has executed and logged, in the arcs of a follower.
//
// Map, limits and saves in progress are not asked: the primary has. Under BSP the clocks that end are
// applied. The status is that of the primary's reply if both have been equal: it is compared
// (replica/follower.h).
//
// Threads: as the ArcGroup's.

#pragma once

#include <cstddef>
#include <exception>

#include "replica/arc_group.h"
#include "replica/orders.h"
#include "wire/wire.h"

namespace shoal {

// The status that reports an exception: BAD_REQUEST for what the caller has given, RESOURCE_EXHAUSTED for the
// budget, else INTERNAL.
wire::Status status_of(const std::exception& error) noexcept;

// In the arcs below `end_slot`. `cut` is scratch memory.
wire::Status replay(const wire::Decoded& request, std::size_t end_slot, ArcGroup& arcs, Cut& cut) noexcept;
// Likewise a request, or an order, as a follower has kept it. `decoded` is scratch memory.
void replay(const KeptRecord& record, ArcGroup& arcs, Cut& cut, wire::Decoded& decoded);
// Executes an order that is not of a stream, and applies the clocks that end by it.
ArcResult execute(const Order& order, ArcGroup& arcs);

}  // namespace shoal
