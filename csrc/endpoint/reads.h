// What changes nothing: PULL, CONTAINS, STATE, PREFETCH, SLOT, SECTION, STATS, and REDUCE and SWEEP where
// they only read (functions.cc). A read that waits for its clock is deferred, and answered later.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "endpoint/request_context.h"
#include "endpoint/service_state.h"

namespace shoal {

bool has_keys(wire::Op op) noexcept;
bool is_read(const wire::Header& header) noexcept;
// Cuts a read along the arcs, into state.cut, with all of its slots that are elsewhere.
void cut_read(ServiceState& state, const wire::Header& header, std::span<const std::uint64_t> hashes);
Outcome read(ServiceState& state, RequestContext& request, ServedTable& table);
// A read that may be answered, and was cut.
Outcome answer(ServiceState& state, RequestContext& request, ServedTable& table);
// Defers a request until its clock is complete; `reply_bytes`: of its reply, if they are known.
Outcome defer(ServiceState& state, const RequestContext& request, std::size_t reply_bytes);
// functions.cc
Outcome answer_function(ServiceState& state, RequestContext& request);
// Of a function that was computed beside the requests. It throws what the function has thrown.
Outcome answer_scan(ServiceState& state, const Scan& scan, RequestContext& request);

}  // namespace shoal
