// What changes rows: PUSH, ASSIGN, ERASE, LOAD_*, TICK, SWEEP, and REDUCE where it changes rows. Each
// function checks a request against the map, the clocks and the limits, has the arcs execute it, and returns
// the reply.

#pragma once

#include "endpoint/request_context.h"
#include "endpoint/service_state.h"

namespace shoal {

Outcome tick(ServiceState& state, RequestContext& request);
Outcome write(ServiceState& state, RequestContext& request, ServedTable& table);
// Also of a sweep that was deferred, once its clock is complete.
Outcome sweep(ServiceState& state, RequestContext& request);
// A load; loads.cc.
Outcome load(ServiceState& state, RequestContext& request, ServedTable& table);
// Whether the worker is loading the table, in all arcs.
bool is_loading(const ServiceState& state, const RequestContext& request, std::uint32_t table) noexcept;

}  // namespace shoal
