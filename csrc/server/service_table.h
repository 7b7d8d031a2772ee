// Service::Table, Service::JobRequests: what a Service keeps about a table in addition to the arcs' shards, and about the
// requests of a job. Private to service_*.cc.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "server/deferred_reads.h"
#include "server/postponed_calls.h"
#include "server/service.h"

namespace shoal {

struct Service::Table {
  explicit Table(TableSpec of)
      : spec(std::move(of)), rows(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata()) {}

  TableSpec spec;
  Rows rows;
  bool is_everywhere = true;  // in all arcs
  std::uint64_t pushes = 0;   // pushes applied at once
};

struct Service::JobRequests {
  std::uint32_t number = 0;                                  // 0: the default job before it has begun
  bool arcs_agree = true;                                    // all have this job, with the same workers
  std::vector<std::unique_ptr<PostponedCalls>> postponed{};  // by rank
  std::vector<std::unique_ptr<FunctionAnswer>> functions{};  // by rank: the last one that was answered
  DeferredReads deferred{};
  std::map<std::uint32_t, std::vector<View>> views{};  // by table, then by rank
};

}  // namespace shoal
