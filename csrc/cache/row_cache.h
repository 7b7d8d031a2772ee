// RowCache: the rows of one table that a worker keeps for some clocks, and the gradients that it has not sent
// yet. A set-associative cache of fixed size in hash order (row_cache.cc, docs/decisions/0039).
//
// An entry has a copy of the row with the number of clocks that it includes, a reader (the pull that is
// fetching the row), and a sum of gradients; with local steps the copy is stepped at once, and the sum is
// copy less base.
//
// Invariants (verify() checks the first three)
//   I1  A hash has at most one entry, in its own bucket.
//   I2  An entry with a sum is in the list of the clock in which the sum began; lists are in ascending order.
//   I3  An entry with a copy, a reader or a sum is in use; one with a reader is not replaced.
//   I4  A copy is at least as new as every row that a caller has got of this key from fill() before.
//   I5  A gradient is in one sum, or was returned to be sent, once. Nothing drops a sum but what returns it.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/statistic.h"
#include "cache/local_steps.h"
#include "cache/tag_bucket.h"

namespace shoal {

// Mistakes that a test plants, to see that its checkers find them.
enum class RowCacheDefect : std::uint8_t {
  kNone,
  kKeepsRowsForALongTime,
  kAddsToWhatItHasSent,
  kKeepsCopiesOfWhatItSends,
  kTakesTheLastAnswer,
  // With local steps:
  kSendsChangesAgain,
  kForgetsWhatChangedMeanwhile,
  kKeepsAnswersThatLackPushes,
  kReadsPassedGradientsLater,
};

class RowCache {
 public:
  static constexpr std::size_t kWays = TagBucket::kWays;
  static constexpr std::uint32_t kAnyClock = 0xffffffffU;

  // Gradients, or sums, to be sent, in hash order.
  struct Sums {
    std::vector<std::uint64_t> hashes;
    std::vector<float> grads;           // of a sum width() for each, of a gradient dim
    std::vector<std::uint32_t> counts;  // empty if occurrences are not counted
  };
  // What a read leaves to do. Positions are those of the batch, ascending.
  struct Rest {
    std::vector<std::uint32_t> fetched;
    std::vector<std::uint32_t> joined;
    std::vector<std::uint32_t> readers;  // whom the joined ones wait for: ascending, each once
    Sums sums;                           // to be sent before what is fetched
  };
  struct Stats {
    std::uint64_t hits = 0;     // rows that were read here
    std::uint64_t fetched = 0;  // rows that were fetched
    std::uint64_t joined = 0;   // rows that waited for another pull
    std::uint64_t refused = 0;  // of those fetched: rows that no entry was free for
    std::uint64_t evicted = 0;  // entries that were replaced
    std::uint64_t added = 0;    // gradients that were added to a sum
    std::uint64_t passed = 0;   // gradients that were sent at once
    std::uint64_t sent = 0;     // sums that were sent
    std::uint64_t dropped = 0;  // local steps that were not finite
  };

  // Room for at least this many rows. std::invalid_argument: rows or dim is 0, or too many.
  RowCache(std::size_t rows, std::size_t dim, bool is_counted, std::optional<LocalSteps> steps = {});

  std::size_t dim() const noexcept { return dim_; }
  // Numbers of a copy and of a sum.
  std::size_t width() const noexcept { return width_; }
  bool makes_steps() const noexcept { return steps_.has_value(); }
  std::size_t capacity() const noexcept { return buckets_ * kWays; }
  std::size_t bytes() const noexcept;
  std::size_t sums() const noexcept { return sums_; }
  const Stats& stats() const noexcept { return stats_; }

  // Copies the rows of ascending hashes that include `clocks` clocks or more. `reader` is the number of this
  // pull, not 0; no other pull in progress has it. `may_join`: false: rows with a reader are fetched, and
  // their answers removed by fill().
  void read(std::span<const std::uint64_t> hashes, std::uint32_t clocks, std::uint32_t reader, bool may_join,
            std::span<float> rows, Rest& rest);
  // Ends a pull: `rows`, of width() numbers, are those of `hashes`, which it has fetched, and include
  // `clocks` clocks. `is_kept`: whether they may become copies.
  void fill(std::span<const std::uint64_t> hashes, std::uint32_t reader, std::uint32_t clocks, bool is_kept,
            std::span<const float> rows);
  // Adds gradients of a clock to the sums of entries in use; the others are appended to `passed`. `counts`:
  // empty: all are 1.
  void add(std::span<const std::uint64_t> hashes, std::span<const float> grads,
           std::span<const std::uint32_t> counts, std::uint32_t clock, Sums& passed);
  // Appends the sums that began at `clock` or before; kAnyClock: all.
  void send_older(std::uint32_t clock, Sums& sums);
  // Writes the weights of whole rows to rows at these positions; with local steps. std::invalid_argument: a
  // position is beyond them.
  void copy_weights_of(std::span<const float> whole, std::span<const std::uint32_t> positions,
                       std::span<float> rows);
  // Appends the sums of these hashes, ascending; removes their copies and readers.
  void send_rows(std::span<const std::uint64_t> hashes, Sums& sums);
  // Removes all copies and readers.
  void forget() noexcept;

  bool verify() const;
  void plant(RowCacheDefect defect) noexcept { defect_ = defect; }

 private:
  // Of an entry's state.
  static constexpr std::uint32_t kListBits = 0xffffU;  // the low bits of the number of its sum's list
  static constexpr std::uint32_t kCopy = 1U << 16U;
  static constexpr std::uint32_t kRow = 2U << 16U;   // with local steps: the copy may be stepped, if not read
  static constexpr std::uint32_t kUsed = 4U << 16U;  // always set; entry 0 has no state
  static constexpr std::uint32_t kSum = 8U << 16U;
  static constexpr std::uint32_t kOneUse = 1U << 24U;  // the high byte counts them
  static constexpr std::uint32_t kMaxUses = 15 * kOneUse;
  static constexpr std::uint8_t kPatience = 8;
  static constexpr std::uint32_t kNone = TagBucket::kNone;
  static constexpr std::size_t kBatches = 4;
  static constexpr std::size_t kMaxLists = kListBits;

  // Followed by the copy and the sum (with local steps the base), width() numbers each, and the count.
  struct Entry {
    std::uint64_t hash;
    std::uint32_t clocks;  // that the copy includes; without a copy, the reader
    std::uint32_t state;
  };
  static_assert(sizeof(Entry) == 16);

  // The entries, for loops: members would be read again after each write to an entry.
  struct Entries {
    std::byte* data;
    std::size_t bytes;

    Entry& operator[](std::uint32_t number) const noexcept {
      return *reinterpret_cast<Entry*>(data + number * bytes);
    }
  };

  // The entries whose sums began in a clock, in the order in which they did.
  struct Begun {
    std::uint32_t clock = 0;
    std::vector<std::uint32_t> entries;
  };

  // The places of a batch that was read.
  struct Batch {
    std::uint32_t reader = 0;
    bool is_pushed = true;
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    std::vector<std::uint32_t> places;
    std::vector<std::uint32_t> fetched;  // those of the rows that its pull fetches
  };

  TagBucket& bucket_of(std::uint64_t hash) const noexcept;
  std::uint32_t find(std::uint64_t hash) const noexcept;
  std::uint32_t find_at(std::uint32_t place, std::uint64_t hash) const noexcept;
  template <bool kOneLine>
  void locate(std::span<const std::uint64_t> hashes, std::size_t begin, std::size_t end,
              std::uint32_t* places, std::size_t bytes) const noexcept;
  template <class Use>
  void walk(std::span<const std::uint64_t> hashes, bool are_known, std::uint32_t* places, std::size_t bytes,
            const Use& use);
  Batch& remember(std::span<const std::uint64_t> hashes, std::uint32_t reader);
  // The places of a batch that was read and not pushed yet, or null.
  std::uint32_t* recall(std::span<const std::uint64_t> hashes) noexcept;
  std::uint32_t* room_for(std::size_t places) {
    places_.resize(std::max(places_.size(), places));
    return places_.data();
  }
  template <bool kOneLine>
  void prefetch_entry(std::uint32_t place, std::size_t bytes) const noexcept;
  std::uint32_t place(std::uint64_t hash, Sums& sums);
  // The state after one more use.
  static std::uint32_t used(std::uint32_t state) noexcept { return state + (state < kMaxUses ? kOneUse : 0); }
  static std::uint32_t reader_of(const Entry& entry) noexcept {
    return (entry.state & kCopy) != 0 ? 0 : entry.clocks;
  }
  bool is_planted(RowCacheDefect defect) const noexcept { return defect_ == defect; }
  void remove_copy(Entry& entry) const noexcept;
  static void remove_reader(Entry& entry) noexcept;
  void take(Entry& entry, Sums& sums);
  void take(Entry& entry, float* grads) noexcept;
  void copy_weights(std::span<std::byte* const> copies, const std::uint32_t* positions, float* rows);
  void become_copy(Entry& entry, const float* row) noexcept;
  void pass(std::uint64_t hash, const float* grad, std::uint32_t times, Sums& passed);
  // Makes local steps in the copies of these positions of a batch.
  void step(std::span<std::byte* const> rows, const std::uint32_t* positions,
            std::span<const std::uint64_t> hashes, const float* grads);
  Begun& list_of(std::uint32_t clock);

  TagBucket* buckets_data() const noexcept { return reinterpret_cast<TagBucket*>(buckets_data_); }
  Entries entries() const noexcept { return {entries_, entry_bytes_}; }
  Entry& entry(std::uint32_t number) const noexcept { return entries()[number]; }
  static float* copy(Entry& entry) noexcept { return reinterpret_cast<float*>(&entry + 1); }
  float* sum(Entry& entry) const noexcept { return copy(entry) + width_; }
  float* base(Entry& entry) const noexcept { return sum(entry); }  // with local steps
  std::uint32_t& count(Entry& entry) const noexcept {
    return *reinterpret_cast<std::uint32_t*>(sum(entry) + width_);
  }

  std::size_t dim_;
  std::optional<LocalSteps> steps_;
  std::size_t width_;
  std::size_t buckets_;
  bool is_counted_;
  std::size_t entry_bytes_;
  Region memory_;
  std::byte* buckets_data_ = nullptr;
  std::byte* entries_ = nullptr;
  std::uint32_t used_ = 0;  // entries 1 to used_ are
  std::array<Batch, kBatches> batches_;
  std::size_t next_batch_ = 0;
  std::deque<Begun> begun_;
  std::uint64_t first_list_ = 0;      // the number of the front one
  std::vector<std::uint32_t> spare_;  // memory of a list that has left
  std::size_t sums_ = 0;
  Stats stats_;
  RowCacheDefect defect_ = RowCacheDefect::kNone;
  std::vector<std::uint32_t> places_;   // of a batch that is not remembered
  std::vector<std::uint32_t> started_;  // entries whose sums began in this push
  std::vector<float> values_;           // of a block
};

template <auto member>
constexpr auto number_of_stats =
    +[](const RowCache& cache) { return static_cast<std::uint64_t>(cache.stats().*member); };

// What a cache has done, and what it holds.
inline constexpr auto kRowCacheStatistics = std::to_array<Statistic<RowCache>>({
    {"hits", number_of_stats<&RowCache::Stats::hits>},
    {"fetched", number_of_stats<&RowCache::Stats::fetched>},
    {"joined", number_of_stats<&RowCache::Stats::joined>},
    {"refused", number_of_stats<&RowCache::Stats::refused>},
    {"evicted", number_of_stats<&RowCache::Stats::evicted>},
    {"added", number_of_stats<&RowCache::Stats::added>},
    {"passed", number_of_stats<&RowCache::Stats::passed>},
    {"sent", number_of_stats<&RowCache::Stats::sent>},
    {"dropped", number_of_stats<&RowCache::Stats::dropped>},
    {"held", [](const RowCache& cache) -> std::uint64_t { return cache.sums(); }},
    {"capacity", [](const RowCache& cache) -> std::uint64_t { return cache.capacity(); }},
    {"bytes", [](const RowCache& cache) -> std::uint64_t { return cache.bytes(); }},
});

}  // namespace shoal
