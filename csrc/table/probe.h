// Probe: finds the rows of a run of hashes in three steps, so that the cache misses of one run overlap with
// the work on another (group prefetching: Chen, Ailamaki, Gibbons, Mowry, ICDE 2004).
//
//   prepare   computes each hash's home line, where its probe sequence begins; reads nothing
//   probe     reads the home lines, and prefetches the second lines of hashes that passed a home
//   resolve   follows the other probe sequences to their ends, and turns row numbers into rows
//
// A run is a sequence of consecutive hashes of a batch, of one or several tables of a layout: a table's part
// of a batch may be too short to keep memory busy. A table may change between two steps: each step detects
// that rows have moved, and repeats the previous one. Only the run's hashes must not be inserted meanwhile.
//
//   a.probe(b.home_lines());   // prefetches b's lines meanwhile; then a.resolve(), a.rows(): null if absent
//
// Threads: not synchronized; the tables' owners lock from prepare to the last use of a row.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/prefetch.h"
#include "table/slot_table.h"

namespace shoal {

class Probe {
 public:
  static constexpr std::size_t kMax = 64;  // hashes: more lines would not stay in the L1 cache
  static constexpr std::size_t kMaxTables = 32;

  // Consecutive hashes of the run that belong to one table.
  struct Part {
    SlotTable* table;
    std::uint64_t version;  // of the table when `lines` was set
    std::byte* lines;
    std::size_t buckets;
    std::uint64_t scramble;  // BucketLines::probe_key
    std::size_t begin;
    std::size_t end;
    bool known;  // the caller supplied its rows

    // The line of bucket b, modulo the number of buckets.
    std::byte* line(std::size_t b) const noexcept {
      return lines + (b < buckets ? b : b % buckets) * kCacheLine;
    }
    std::size_t bucket(const std::byte* line) const noexcept {
      return static_cast<std::size_t>(line - lines) / kCacheLine;
    }
  };

  explicit Probe(const Layout& layout) noexcept;

  // Starts an empty run over `hashes`; prepare() adds them in order.
  void start(const std::uint64_t* hashes) noexcept;
  // The next `count` hashes belong to `table`. A run has at most kMax hashes of at most kMaxTables tables.
  void prepare(SlotTable& table, std::size_t count) noexcept;

  // Adds hashes whose rows are known, as of the present table.version().
  void add_known(SlotTable& table, std::span<std::byte* const> rows) noexcept;

  // The lines that probe() will read, or the starts of known rows. Valid until probe().
  PrefetchCursor home_lines() const noexcept { return {at_.data(), size_}; }

  void probe(PrefetchCursor& ahead) noexcept;
  void resolve() noexcept;
  // Call resolve() again after inserts to refresh the pointers: it does nothing if no row has moved.
  std::span<std::byte*> rows() noexcept { return {at_.data(), size_}; }

  std::size_t size() const noexcept { return size_; }
  std::span<const Part> parts() const noexcept { return {parts_.data(), parts_count_}; }

 private:
  friend struct ProbeSteps;

  using ProbeLines = void (*)(Probe&, PrefetchCursor&) noexcept;
  using Follow = void (*)(Probe&) noexcept;

  bool moved() const noexcept;
  void prepare_again() noexcept;
  void find_rows() noexcept;

  std::array<std::byte*, kMax> at_;       // first the line, then the payload, then the row or null
  std::array<std::uint32_t, kMax> open_;  // hashes whose search is not finished
  std::array<Part, kMaxTables> parts_;
  const std::uint64_t* hashes_ = nullptr;
  std::size_t size_ = 0;
  std::size_t open_count_ = 0;
  std::size_t parts_count_ = 0;
  bool resolved_ = false;
  const Layout* layout_;
  std::uint64_t in_use_;
  PassedBits passed_;
  ProbeLines probe_;
  Follow follow_;
};

}  // namespace shoal
