// TierStats: what a tier (tier/tier.h), which holds the rows of a shard on a disk, has in memory and on the disk, and what it has done.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shoal {

struct TierStats {
  std::uint64_t rows_in_memory = 0;
  std::uint64_t rows_on_disk = 0;       // valid or not
  std::uint64_t memory_bytes = 0;       // what is compared with the limit
  std::uint64_t index_bytes = 0;        // of that: filters, fences and heat
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

  // In this order, as numbers that can be added up; is_direct and is_async are 0 or 1.
  static constexpr std::size_t kNumbers = 18;
  std::array<std::uint64_t, kNumbers> numbers() const noexcept {
    return {rows_in_memory,
            rows_on_disk,
            memory_bytes,
            index_bytes,
            disk_bytes,
            hits,
            misses,
            prefetched,
            absent,
            absent_reads,
            reads,
            merges,
            background_merges,
            merged_bytes_read,
            bytes_written,
            rows_changed,
            is_direct ? std::uint64_t{1} : 0,
            is_async ? std::uint64_t{1} : 0};
  }
};

}  // namespace shoal
