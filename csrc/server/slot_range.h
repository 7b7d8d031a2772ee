// SlotRange: slots [first, end).

#pragma once

#include <cstddef>

namespace shoal {

struct SlotRange {
  std::size_t first = 0;
  std::size_t end = 0;
};

}  // namespace shoal
