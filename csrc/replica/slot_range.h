// SlotRange: slots [first, end).

#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace shoal {

struct SlotRange {
  std::size_t first = 0;
  std::size_t end = 0;
};

// Whether the range of an arc is among those of arcs.
inline bool contains(std::span<const SlotRange> ranges, const SlotRange& arc) noexcept {
  return std::ranges::any_of(ranges, [&](const SlotRange& range) { return range.first == arc.first; });
}

}  // namespace shoal
