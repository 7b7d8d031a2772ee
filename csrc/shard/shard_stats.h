// ShardStats: what a shard holds and what it has done since it was made.
//
// kShardStatistics lists them once: the numbers of a STATS message, the dict in Python and the names of
// metrics follow from it. Whoever has several shards of a table adds their numbers up, except those of which
// one request reaches all shards. kShardCounters lists those that a shard counts: what is reported, and what
// a copy of the shard has, follow from it.
//
// Threads: ShardStats is a value, of counters that are read one after the other: while calls are in progress
// they may be of slightly different moments. ShardCounters: any.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "base/statistic.h"
#include "policy/lifecycle.h"
#include "table/slot_table.h"

namespace shoal {

struct ShardStats {
  std::uint64_t rows = 0;
  std::uint64_t cells = 0;  // capacity of the index; rows / cells is the load
  std::uint64_t bytes = 0;
  std::uint64_t pulls = 0;  // calls
  std::uint64_t pushes = 0;
  std::uint64_t rows_pulled = 0;
  std::uint64_t rows_pushed = 0;
  std::uint64_t rows_created = 0;
  std::uint64_t rows_erased = 0;
  std::uint64_t nonfinite_rows = 0;
  std::uint64_t refused = 0;                               // occurrences of keys that were not admitted
  std::uint64_t waiting = 0;                               // keys with an exact count that wait for a row
  std::array<std::uint64_t, Expiry::kKinds> expired = {};  // rows, by the kind of the rule
  SlotTable::Growth growth;                                // summed over the slots; longest_ns is the maximum
};

inline constexpr auto kShardStatistics = std::to_array<Statistic<ShardStats>>({
    {"rows", number_of<&ShardStats::rows>, Reported::kGauge, "Rows of a table"},
    {"cells", number_of<&ShardStats::cells>},
    {"bytes", number_of<&ShardStats::bytes>, Reported::kGauge, "Bytes of its rows with their index"},
    {"pulls", number_of<&ShardStats::pulls>, Reported::kNot, "", true},  // a request to all arcs counts once
    {"pushes", number_of<&ShardStats::pushes>, Reported::kNot, "", true},
    {"rows_pulled", number_of<&ShardStats::rows_pulled>, Reported::kCounter, "Keys pulled"},
    {"rows_pushed", number_of<&ShardStats::rows_pushed>, Reported::kCounter, "Keys pushed"},
    {"rows_created", number_of<&ShardStats::rows_created>, Reported::kCounter,
     "Rows created: keys that were admitted"},
    {"rows_erased", number_of<&ShardStats::rows_erased>, Reported::kCounter,
     "Rows that were erased by a call"},
    {"nonfinite_rows", number_of<&ShardStats::nonfinite_rows>, Reported::kCounter,
     "Gradients that were dropped since they are not finite"},
    {"refused", number_of<&ShardStats::refused>, Reported::kCounter,
     "Occurrences of keys that were not admitted"},
    {"waiting", number_of<&ShardStats::waiting>, Reported::kGauge,
     "Keys that are counted and have no row yet"},
    {"rows_expired",
     [](const ShardStats& stats) {
       return std::accumulate(stats.expired.begin(), stats.expired.end(), std::uint64_t{0});
     },
     Reported::kCounter, "Rows that an expiry rule evicted"},
    {"expired_by_TimeToLive", [](const ShardStats& stats) { return stats.expired[0]; }},
    {"expired_by_DecayedScore", [](const ShardStats& stats) { return stats.expired[1]; }},
    {"expired_by_MinNorm", [](const ShardStats& stats) { return stats.expired[2]; }},
    {"expired_by_MaxRows", [](const ShardStats& stats) { return stats.expired[3]; }},
});

// Of a SlotTable, and summed over slots: no other process asks for them.
inline constexpr auto kGrowthStatistics = std::to_array<Statistic<SlotTable::Growth>>({
    {"growths", number_of<&SlotTable::Growth::times>},
    {"growing_memory_ns", number_of<&SlotTable::Growth::memory_ns>},
    {"growing_moving_ns", number_of<&SlotTable::Growth::moving_ns>},
    {"longest_move_ns", number_of<&SlotTable::Growth::longest_ns>, Reported::kNot, "", true},
});

struct ShardCounters {
  using Counter = std::atomic<std::uint64_t>;
  static constexpr std::size_t kAges = 33;

  Counter pulls{0};
  Counter rows_pulled{0};
  Counter pushes{0};
  Counter rows_pushed{0};
  Counter rows_created{0};
  Counter rows_erased{0};
  Counter nonfinite_rows{0};
  Counter refused{0};
  std::array<Counter, Expiry::kKinds> expired{};
  std::array<Counter, kAges> returns{};  // occurrences of rows since the last sweep, by age (Shard::sweep)

  void write_to(ShardStats& stats) const noexcept;
  // Calls use(counter) for those that count changes, which a copy of a shard has.
  template <class Use>
  void each_of_changes(const Use& use);
};

struct ShardCounter {
  ShardCounters::Counter ShardCounters::* counter;
  std::uint64_t ShardStats::* number;
  bool is_of_changes = true;
};

inline constexpr auto kShardCounters = std::to_array<ShardCounter>({
    {&ShardCounters::pulls, &ShardStats::pulls, false},
    {&ShardCounters::rows_pulled, &ShardStats::rows_pulled, false},
    {&ShardCounters::pushes, &ShardStats::pushes},
    {&ShardCounters::rows_pushed, &ShardStats::rows_pushed},
    {&ShardCounters::rows_created, &ShardStats::rows_created},
    {&ShardCounters::rows_erased, &ShardStats::rows_erased},
    {&ShardCounters::nonfinite_rows, &ShardStats::nonfinite_rows},
    {&ShardCounters::refused, &ShardStats::refused},
});

inline void ShardCounters::write_to(ShardStats& stats) const noexcept {
  for (const auto& [counter, number, is_of_changes] : kShardCounters) {
    stats.*number = (this->*counter).load();
  }
  for (std::size_t k = 0; k < expired.size(); ++k) {
    stats.expired[k] = expired[k].load();
  }
}

template <class Use>
void ShardCounters::each_of_changes(const Use& use) {
  for (const auto& [counter, number, is_of_changes] : kShardCounters) {
    if (is_of_changes) {
      use(this->*counter);
    }
  }
  for (Counter& counter : expired) {
    use(counter);
  }
  for (Counter& counter : returns) {
    use(counter);
  }
}

}  // namespace shoal
