#include "kernel/count_min.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/mix.h"
#include "base/simd.h"

namespace shoal {

namespace {

__extension__ using Wide = unsigned __int128;

// Below it a thread costs more than it saves.
constexpr std::size_t kMinKeysPerThread = 4096;

struct RowHash {
  std::uint64_t low;   // a
  std::uint64_t high;  // a
  Wide add;            // b
  std::uint64_t width;

  RowHash(const CountMin& sketch, std::size_t row) noexcept : width(sketch.width) {
    // Four numbers of the SplitMix64 stream of mix(seed).
    constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15U;
    std::uint64_t state = mix(sketch.seed) + 4 * row * kStep;
    const auto next = [&state] { return mix(state += kStep); };
    low = next();
    high = next();
    add = static_cast<Wide>(next()) << 64U;
    add |= next();
  }

  SHOAL_INLINE std::size_t operator()(std::uint64_t key) const noexcept {
    const Wide product = static_cast<Wide>(low) * key + add;
    return scale(static_cast<std::uint64_t>(product >> 64U) + high * key, width);
  }
};

// Counters are prefetched some keys ahead: rows that are larger than the caches.
constexpr std::size_t kAhead = 32;

template <class Count>
void add_to_row(const RowHash& position, std::span<const std::uint64_t> keys, std::uint64_t* row,
                const Count& count) noexcept {
  std::size_t positions[kAhead];
  const std::size_t first = std::min(keys.size(), kAhead);
  for (std::size_t i = 0; i < first; ++i) {
    positions[i] = position(keys[i]);
    __builtin_prefetch(row + positions[i], 1, 2);
  }
  std::size_t i = 0;
  for (; i + kAhead < keys.size(); ++i) {
    const std::size_t next = position(keys[i + kAhead]);
    __builtin_prefetch(row + next, 1, 2);
    std::size_t& ring = positions[i % kAhead];
    row[ring] += count(i);
    ring = next;
  }
  for (; i < keys.size(); ++i) {
    row[positions[i % kAhead]] += count(i);
  }
}

void check(const CountMin& sketch) {
  SHOAL_CHECK(sketch.depth > 0 && sketch.width > 0, "a sketch has at least one row and one counter");
  SHOAL_CHECK(sketch.width <= std::numeric_limits<std::size_t>::max() / sizeof(std::int64_t) / sketch.depth,
              "a sketch of " + std::to_string(sketch.depth) + " x " + std::to_string(sketch.width) +
                  " counters does not fit into memory");
}

template <class Row>
void each_row(const CountMin& sketch, std::size_t keys, ThreadPool& pool, const Row& row) {
  if (keys < kMinKeysPerThread) {
    for (std::size_t r = 0; r < sketch.depth; ++r) {
      row(r);
    }
  } else {
    pool.run(sketch.depth, row);
  }
}

}  // namespace

void count_min_add(const CountMin& sketch, std::span<const std::uint64_t> keys,
                   std::span<const std::int64_t> counts, std::span<std::int64_t> counters, ThreadPool& pool) {
  check(sketch);
  SHOAL_CHECK(counts.empty() || counts.size() == keys.size(),
              "counts must have one number for each of the " + std::to_string(keys.size()) + " keys, got " +
                  std::to_string(counts.size()));
  SHOAL_CHECK(counters.size() >= sketch.depth * sketch.width,
              "counters must have " + std::to_string(sketch.depth * sketch.width) + " numbers, got " +
                  std::to_string(counters.size()));
  each_row(sketch, keys.size(), pool, [&](std::size_t r) {
    const RowHash position(sketch, r);
    // Sums modulo 2^64: unsigned.
    auto* const row = reinterpret_cast<std::uint64_t*>(counters.data()) + r * sketch.width;
    if (counts.empty()) {
      add_to_row(position, keys, row, [](std::size_t /*unused*/) { return std::uint64_t{1}; });
    } else {
      add_to_row(position, keys, row, [&](std::size_t i) { return static_cast<std::uint64_t>(counts[i]); });
    }
  });
}

void count_min_positions(const CountMin& sketch, std::span<const std::uint64_t> keys,
                         std::span<std::int64_t> out, ThreadPool& pool) {
  check(sketch);
  SHOAL_CHECK(out.size() == sketch.depth * keys.size(),
              "out must have " + std::to_string(sketch.depth) + " numbers for each key");
  each_row(sketch, keys.size(), pool, [&](std::size_t r) {
    const RowHash position(sketch, r);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      out[r * keys.size() + i] = static_cast<std::int64_t>(r * sketch.width + position(keys[i]));
    }
  });
}

}  // namespace shoal
