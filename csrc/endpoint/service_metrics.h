// ServiceLimits, ServiceMetrics: what bounds a Service, and what it counts. Threads: values.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/statistic.h"
#include "base/units.h"
#include "endpoint/histogram.h"
#include "tier/tier_space.h"
#include "wire/values.h"
#include "wire/wire.h"

namespace shoal {

struct ServiceLimits {
  std::size_t deferred_reads = 4096;
  std::size_t deferred_bytes = GiB;
  std::size_t pending_bytes = GiB;
  std::size_t reply_bytes = GiB;
  std::size_t held_bytes = 256 * MiB;     // of replies that wait for a commit (server/replication_log.h)
  std::uint64_t request_bytes = GiB;      // the transport has its own limit
  std::size_t key_list_bytes = 64 * MiB;  // cached key lists
  std::shared_ptr<TierSpace> tier = {};   // of all arcs (Arc::set_tier)
};

struct ServiceMetrics {
  std::uint64_t messages = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t replies = 0;
  std::uint64_t bytes_out = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(wire::kLastOp) + 1> requests{};  // by op
  std::array<std::uint64_t, 32> statuses{};                                           // of replies
  std::uint64_t duplicates = 0;      // writes, or slots of writes, that had been executed before
  std::uint64_t dropped_pushes = 0;  // of workers that were dismissed before their tick
  std::uint64_t failed_steps = 0;    // steps that failed, mostly for lack of memory; they are retried
  std::size_t deferred_reads = 0;
  std::size_t deferred_peak = 0;
  std::size_t deferred_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t pending_peak = 0;
  std::uint64_t budget_bytes = 0;  // for the rows of the slots that are served here; 0: no limit
  std::uint32_t applied = 0;
  std::uint32_t floor = 0;
  std::size_t key_lists = 0;  // cached
  std::size_t key_list_bytes = 0;
  std::uint64_t key_list_hits = 0;  // requests whose digest was found
  std::uint64_t key_list_misses = 0;
  std::uint64_t weight_bytes_saved = 0;  // in replies to pulls, by 16 bits or omitted zeros
  NarrowingErrors narrowed;              // weights that were sent in 16 bits
  std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks;  // (rank, clock) of the admitted workers
  // Of a named job; `applied`, `floor` and `clocks` above are those of the default job.
  struct NamedJob {
    std::uint32_t number = 0;
    std::uint32_t applied = 0;
    std::uint32_t floor = 0;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks{};
  };
  std::vector<NamedJob> jobs;
  Histogram pull_staleness;  // clocks between a pull and the slowest worker
  Histogram push_staleness;  // pushes of others to the table since the worker's last pull of it
};

inline constexpr auto kServiceStatistics = std::to_array<Statistic<ServiceMetrics>>({
    {"messages", number_of<&ServiceMetrics::messages>, Reported::kCounter, "Requests received"},
    {"replies", number_of<&ServiceMetrics::replies>, Reported::kCounter, "Replies sent"},
    {"bytes_in", number_of<&ServiceMetrics::bytes_in>, Reported::kCounter, "Bytes received"},
    {"bytes_out", number_of<&ServiceMetrics::bytes_out>, Reported::kCounter, "Bytes sent"},
    {"duplicates", number_of<&ServiceMetrics::duplicates>, Reported::kCounter,
     "Pushes that had been received before"},
    {"dropped_pushes", number_of<&ServiceMetrics::dropped_pushes>},
    {"failed_steps", number_of<&ServiceMetrics::failed_steps>, Reported::kCounter,
     "Steps that could not be applied"},
    {"deferred_reads", number_of<&ServiceMetrics::deferred_reads>, Reported::kGauge,
     "Pulls that wait for pushes of other workers"},
    {"deferred_peak", number_of<&ServiceMetrics::deferred_peak>},
    {"deferred_bytes", number_of<&ServiceMetrics::deferred_bytes>, Reported::kGauge,
     "Bytes of pulls that wait for pushes of other workers"},
    {"pending_bytes", number_of<&ServiceMetrics::pending_bytes>, Reported::kGauge,
     "Bytes of pushes that wait for those of other workers"},
    {"pending_peak", number_of<&ServiceMetrics::pending_peak>},
    {"budget_bytes", number_of<&ServiceMetrics::budget_bytes>, Reported::kGauge,
     "Memory that --memory allows for the rows; 0: no limit"},
    {"key_lists", number_of<&ServiceMetrics::key_lists>},
    {"key_list_bytes", number_of<&ServiceMetrics::key_list_bytes>},
    {"key_list_hits", number_of<&ServiceMetrics::key_list_hits>},
    {"key_list_misses", number_of<&ServiceMetrics::key_list_misses>},
    {"weight_bytes_saved", number_of<&ServiceMetrics::weight_bytes_saved>},
    {"deferrals",
     [](const ServiceMetrics& all) { return all.statuses[std::size_t(wire::Status::kDeferred)]; },
     Reported::kCounter, "Pulls that had to wait for pushes of other workers"},
});

}  // namespace shoal
