// The begin of each slot's hashes, which are ascending, and their end.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mix.h"

namespace shoal {

inline std::vector<std::uint64_t> slot_begins(std::span<const std::uint64_t> hashes, std::size_t slots) {
  const Slots cut(slots);
  std::vector<std::uint64_t> begins(slots + 1);
  for (const std::uint64_t hash : hashes) {
    ++begins[index_of(cut.of(hash)) + std::size_t{1}];
  }
  for (std::size_t slot = 0; slot < slots; ++slot) {
    begins[slot + 1] += begins[slot];
  }
  return begins;
}

}  // namespace shoal
