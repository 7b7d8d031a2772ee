// What a Service keeps of a table beside its rows. Private to service_*.cc.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/service.h"

namespace shoal {

struct Service::Table {
  explicit Table(std::shared_ptr<Shard> rows) : shard(std::move(rows)) {}

  std::shared_ptr<Shard> shard;    // which a save may hold longer than the table
  std::shared_ptr<Shard> loading;  // beside it: takes its place when the load ends
  std::uint32_t loader = 0;        // the rank that loads
  std::uint64_t pushes = 0;        // applied
  std::vector<View> views;         // by rank
  std::string full;  // why a step of BSP was not made: no room for its rows; told until there is some
};

}  // namespace shoal
