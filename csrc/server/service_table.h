// Service::Table: what a Service keeps about a table in addition to the arcs' shards. Private to service_*.cc.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "server/service.h"

namespace shoal {

struct Service::Table {
  explicit Table(TableSpec of)
      : spec(std::move(of)), rows(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata()) {}

  TableSpec spec;
  Rows rows;
  bool is_everywhere = true;  // in all arcs
  std::uint64_t pushes = 0;   // pushes applied at once
  std::vector<View> views;    // by rank
};

}  // namespace shoal
