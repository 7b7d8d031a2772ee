// Arcs that tests move from one Service to another.

#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "endpoint/service.h"

namespace shoal {

inline std::vector<std::unique_ptr<Arc>> take_arcs(Service& from, const std::vector<SlotRange>& ranges) {
  std::vector<std::unique_ptr<Arc>> arcs;
  from.take_arcs(ranges, arcs);
  return arcs;
}

inline void move_arcs(Service& from, Service& to, const std::vector<SlotRange>& ranges) {
  auto arcs = take_arcs(from, ranges);
  to.adopt(arcs);
}

}  // namespace shoal
