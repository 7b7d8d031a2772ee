// Probe: the rows of a run of hashes, found in steps, so that memory answers one run while another is worked on.
//
//   aim      each hash's home, the line where its way begins (table/slot_table.h); nothing is read yet
//   look     reads the homes, and asks for the second lines of those whose home is full of others
//   settle   follows their ways to the end, and turns row numbers into rows, whose lines are the caller's to ask for
//
// Idea. A run is consecutive hashes of a batch. They may belong to several tables of one layout: a table's part of a large
// batch may be no more than a few dozen hashes, too few to keep memory busy. A table may change between two steps: a step
// sees that rows have moved since the one before, and does that one again. Only the run's own hashes must not be inserted
// before it is settled.
//
//   Probe a(layout), b(layout);
//   a.start(...); a.aim(...); b.start(...); b.aim(...);
//   auto next = b.homes();
//   a.look(next);                          // b's homes are asked for meanwhile
//   a.settle();
//   for (std::byte* row : a.rows()) ...    // null for a hash that is not there
//
// Threads: none of its own; the tables' owners lock from aim to the last use of a row.

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
  static constexpr std::size_t kMax = 64;  // hashes: more lines would not stay in the nearest cache
  static constexpr std::size_t kMaxTables = 32;

  // Where some consecutive hashes of the run belong.
  struct Part {
    SlotTable* table;
    std::uint64_t version;  // of the table, when its lines were taken
    std::byte* lines;
    std::size_t buckets;
    std::uint64_t scramble;  // SlotTable::probe_key
    std::size_t begin;
    std::size_t end;
    bool known;  // its rows were given

    // The line of bucket b, counted on round the end.
    std::byte* line(std::size_t b) const noexcept {
      return lines + (b < buckets ? b : b % buckets) * kCacheLine;
    }
    std::size_t bucket(const std::byte* line) const noexcept {
      return static_cast<std::size_t>(line - lines) / kCacheLine;
    }
  };

  explicit Probe(const Layout& layout) noexcept;

  // An empty run; its hashes follow by aim, in the order of the array.
  void start(const std::uint64_t* hashes) noexcept;
  // The next `count` hashes belong to `table`. No more than kMax in all, and of kMaxTables tables.
  void prepare(SlotTable& table, std::size_t count) noexcept;

  // The same where it is known that these are their rows, as table.version() is what it was then.
  void add_known(SlotTable& table, std::span<std::byte* const> rows) noexcept;

  // The lines that look will read, or where known rows begin. Good until look.
  PrefetchCursor home_lines() const noexcept { return {at_.data(), size_}; }

  void probe(PrefetchCursor& ahead) noexcept;
  void resolve() noexcept;
  // After rows were inserted, or to have pointers that are good again: settle does nothing where nothing has changed.
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

  std::array<std::byte*, kMax> at_;       // the line to read; then the payload; then the row, or null
  std::array<std::uint32_t, kMax> open_;  // hashes whose way goes on
  std::array<Part, kMaxTables> parts_;
  const std::uint64_t* hashes_ = nullptr;
  std::size_t size_ = 0;
  std::size_t open_count_ = 0;
  std::size_t parts_count_ = 0;
  bool resolved_ = false;
  const Layout* layout_;
  std::uint64_t in_use_;
  ProbeLines probe_;
  Follow follow_;
};

}  // namespace shoal
