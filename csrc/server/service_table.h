// Service::Table: what a Service keeps about a table in addition to its rows. Private to service_*.cc.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/service.h"

namespace shoal {

struct Service::Table {
  explicit Table(std::shared_ptr<Shard> rows) : shard(std::move(rows)) {}

  std::shared_ptr<Shard> shard;    // shared: a save may outlive the table
  std::shared_ptr<Shard> loading;  // replaces `shard` when the load ends
  std::uint32_t loader = 0;        // the rank of the worker that loads
  std::uint64_t pushes = 0;        // pushes applied
  std::vector<View> views;         // by rank
  std::string full;  // why a BSP step was not made: no memory for its rows; reported until there is
};

}  // namespace shoal
