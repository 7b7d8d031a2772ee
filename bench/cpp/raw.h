// The machine's raw limit: random cache lines of a region, read or read and written, fetched ahead as a table's are.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "base/prefetch.h"
#include "base/threads.h"
#include "measure.h"

namespace shoal {

// Numbers of random lines of `region`.
inline void draw_lines(const Region& region, Random& random, std::vector<std::uint32_t>& lines) {
  for (auto& line : lines) {
    line = static_cast<std::uint32_t>(scale(random.next(), region.bytes() / kCacheLine));
  }
}

// Millions of lines a second.
inline double raw_rate(Region& region, const std::vector<std::uint32_t>& lines, bool update,
                       ThreadPool& pool) {
  constexpr std::size_t kAhead = 64;
  std::atomic<std::uint64_t> sink{0};
  std::byte* const base = region.data();
  const auto start = Clock::now();
  const Partition partition{lines.size(), pool.threads()};
  pool.run(partition.parts, [&](std::size_t part) {
    std::uint64_t sum = 0;
    const std::size_t end = partition.begin(part + 1);
    for (std::size_t i = partition.begin(part); i < end; ++i) {
      prefetch(base + std::size_t{lines[std::min(i + kAhead, end - 1)]} * kCacheLine);
      std::byte* const line = base + std::size_t{lines[i]} * kCacheLine;
      std::uint64_t words[2];
      std::memcpy(&words[0], line, 8);
      std::memcpy(&words[1], line + 56, 8);
      sum += words[0] + words[1];
      if (update) {
        words[0] += i;
        std::memcpy(line, &words[0], 8);
      }
    }
    sink.fetch_add(sum);
  });
  const double seconds = seconds_since(start);
  return sink.load() == 1 ? 0 : static_cast<double>(lines.size()) / seconds / 1e6;
}

}  // namespace shoal
