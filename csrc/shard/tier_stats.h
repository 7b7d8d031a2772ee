// TierStats: what a tier (tier/tier.h), which holds the rows of a shard on a disk, has in memory and on the
// disk, and what it has done.

#pragma once

#include <array>
#include <cstdint>

#include "base/statistic.h"

namespace shoal {

struct TierStats {
  std::uint64_t rows_in_memory = 0;
  std::uint64_t rows_on_disk = 0;       // valid or not
  std::uint64_t memory_bytes = 0;       // what is compared with the limit
  std::uint64_t index_bytes = 0;        // of that: filters, fences and use counters
  std::uint64_t disk_bytes = 0;         // of the file
  std::uint64_t hits = 0;               // keys of batches whose rows were in memory
  std::uint64_t misses = 0;             // read from the disk
  std::uint64_t prefetched = 0;         // of these, before the call that needed them
  std::uint64_t absent = 0;             // neither in memory nor on disk
  std::uint64_t absent_reads = 0;       // of these, for which a page was read
  std::uint64_t reads = 0;              // pages read for batches
  std::uint64_t merges = 0;             // runs written
  std::uint64_t background_merges = 0;  // of these, between calls
  std::uint64_t merged_bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t rows_changed =
      0;  // keys of calls that change rows: rows_changed x row bytes is what had to be written
  bool is_direct = false;
  bool is_async = false;
};

// The flags count 1.
inline constexpr auto kTierStatistics = std::to_array<Statistic<TierStats>>({
    {"rows_in_memory", number_of<&TierStats::rows_in_memory>, Reported::kGauge,
     "Rows of a table with a tier that are in memory"},
    {"rows_on_disk", number_of<&TierStats::rows_on_disk>},
    {"memory_bytes", number_of<&TierStats::memory_bytes>, Reported::kGauge,
     "Memory of its tier, as --tier bounds it"},
    {"index_bytes", number_of<&TierStats::index_bytes>},
    {"disk_bytes", number_of<&TierStats::disk_bytes>, Reported::kGauge, "Size of its tier's files"},
    {"hits", number_of<&TierStats::hits>, Reported::kCounter, "Keys whose row was in memory"},
    {"misses", number_of<&TierStats::misses>, Reported::kCounter, "Keys whose row was read from the disk"},
    {"prefetched", number_of<&TierStats::prefetched>, Reported::kCounter,
     "Of these, before the call that needed it"},
    {"absent", number_of<&TierStats::absent>},
    {"absent_reads", number_of<&TierStats::absent_reads>},
    {"reads", number_of<&TierStats::reads>, Reported::kCounter, "Pages read for keys"},
    {"merges", number_of<&TierStats::merges>, Reported::kCounter,
     "How often the rows of a slot were written to the disk"},
    {"background_merges", number_of<&TierStats::background_merges>},
    {"merged_bytes_read", number_of<&TierStats::merged_bytes_read>},
    {"bytes_written", number_of<&TierStats::bytes_written>, Reported::kCounter, "Bytes written to the disk"},
    {"rows_changed", number_of<&TierStats::rows_changed>},
    {"is_direct", number_of<&TierStats::is_direct>},
    {"is_async", number_of<&TierStats::is_async>},
});

}  // namespace shoal
