// Cutting a call into parts: along the map's runs of slots, and where a message would be too large.
//
// A keyed call needs a message for each run of slots in which it has keys: adjacent arcs of an endpoint share
// one. A call of one slot goes to the endpoint of that slot, any other call once to each that serves slots.
//
// Threads: functions of their arguments.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/call.h"
#include "client/slot_map.h"

namespace shoal::client {

// What one message carries.
struct Cut {
  std::uint32_t endpoint;  // index
  std::uint32_t first_slot;
  std::uint32_t end_slot;
  std::size_t begin;  // of the call's hashes
  std::size_t end;
};

// A cut for each message that slots [first, end) of a call need under a map.
std::vector<Cut> cut(const Call& call, const SlotMap& map, const Policy& policy, std::uint32_t first,
                     std::uint32_t end);

// Throws std::invalid_argument if the rows of a slot need more bytes than a server takes.
void check_fits(const Call& call, const SlotMap& map, const Policy& policy);

}  // namespace shoal::client
