// The description of a table as bytes and back, to send it to another server.
//
//   u8 version | u32 dim | u8 dtype | optimizer | init | u64 init seed | u64 seed | u8 admission rules (0, 1)
//   | rule | u8 expiry rules | rule ...
//
//   optimizer, init, rule   text name | u8 parameters | (text name | f64 value) ..., in the order of the
//                           names
//
// Equal descriptions have equal bytes. Decoding makes the same checks as a table's creation.

#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "shard/shard.h"

namespace shoal {

std::vector<std::byte> encode(const TableSpec& spec);

// std::invalid_argument, which names the field, for anything that encode() has not made.
TableSpec decode_spec(std::span<const std::byte> bytes);

}  // namespace shoal
