// Bloom: how often keys that wait for their rows were sighted, about, in memory of a fixed size: a counting Bloom filter
// (Fan, Cao, Almeida, Broder, "Summary cache", SIGCOMM'98) whose counters of one key stand in one cache line.
//
//   the filter   one row of lines for the whole table, in the order of the hash: kUnits equal pieces of the hash space,
//                lines_per_unit() lines each; a slot keeps those of its own units
//   a line       128 counters of 4 bits, or 64 of 8 where n is above 15; a key has hashes() of them, at random
//   a key's count is the least of its counters, and a sighting raises only those that are below the new count
//                (Estan, Varghese, "New directions in traffic measurement", SIGCOMM'02: conservative update)
//
// So a count is never too low: a key may be admitted early, never late. And since lines follow the hash, not the slot,
// a filter that was saved with one number of slots is cut exactly for another.
//
// With `within`, time is cut into windows of so many clocks, and a slot's filter starts anew in each.
//
// Threads: none of its own; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "policy/lifecycle.h"
#include "table/pre_image_log.h"

namespace shoal {

// What the filters of a table's slots have in common.
class BloomShape {
 public:
  static constexpr std::size_t kUnits = Slots::kMax;
  static constexpr unsigned kUnitBits = 14;
  static constexpr std::size_t kMaxHashes = 8;

  // As small as keeps the error below the rule's when the filter holds as many keys as its capacity.
  explicit BloomShape(const Admission& rule);

  std::size_t lines_per_unit() const noexcept { return lines_per_unit_; }
  std::size_t hashes() const noexcept { return hashes_; }
  bool wide() const noexcept { return wide_; }  // counters of 8 bits
  std::size_t slot_bytes(Slots slots) const noexcept {
    return kUnits / slots.count() * lines_per_unit_ * kCacheLine;
  }
  // Which of the table's lines is a hash's.
  std::size_t line_of(std::uint64_t hash) const noexcept {
    return (hash >> (64U - kUnitBits)) * lines_per_unit_ + scale(hash << kUnitBits, lines_per_unit_);
  }

 private:
  std::size_t lines_per_unit_;
  std::size_t hashes_;
  bool wide_;
};

class Bloom {
 public:
  Bloom(const BloomShape& shape, Slots slots, Slot slot, std::uint32_t n, std::uint32_t within) noexcept
      : shape_(&shape),
        first_name_(slots.first_hash(slot)),
        slot_bits_(slots.bits()),
        bytes_(shape.slot_bytes(slots)),
        first_line_(index_of(slot) * (bytes_ / kCacheLine)),
        n_(n),
        within_(within) {}

  std::size_t bytes() const noexcept { return lines_.bytes(); }
  std::size_t whole_bytes() const noexcept { return bytes_; }

  // The first time it takes its memory: before ask.
  void make_room() { lines_.resize(bytes_); }
  // `count` sightings of a key without a row. Whether it gets one.
  bool ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  void sweep(std::uint32_t now) noexcept;

  // The window u32, 4 bytes of zeros, the lines. Nothing where there are none yet.
  void save(std::vector<std::byte>& bytes) const;
  // Those lines of a saved slot of another cut that belong here. The caller has made room.
  static constexpr std::size_t kHead = 8;
  void restore(Slots cut, Slot slot, std::span<const std::byte> bytes) noexcept;

  // A filter as it was when a save began: all of its lines, where it has started anew since; else those that have changed.
  struct Before {
    std::uint32_t window = 0;
    bool had_lines = false;
    bool anew = false;
    Region lines;
    PreImageLog changed;
  };
  // While a save is under way, changes are kept in `before`: by keep(), which comes before keys are asked about (ascending
  // hashes), and here where the filter starts anew; `lost` is set where memory for that ran out. Null: no save is.
  void watch(Before* before, bool* lost) noexcept;
  void keep(std::span<const std::uint64_t> hashes);
  const Region& lines() const noexcept { return lines_; }
  // As save() does, of `lines`, which are a copy of lines(), with what was kept laid over them. Reads nothing that changes.
  void save(const Before& before, std::span<std::byte> lines, std::vector<std::byte>& bytes) const;

 private:
  // Lines by a number that serves as a hash in a PreImageLog.
  std::uint64_t name_of(std::size_t line) const noexcept;
  std::size_t line_named(std::uint64_t name) const noexcept;
  unsigned name_shift() const noexcept;
  std::byte* line(std::uint64_t hash) const noexcept;
  // Whether this is the filter's window still; else it starts anew.
  void turn_to(std::uint32_t window) noexcept;

  const BloomShape* shape_;
  std::uint64_t first_name_;
  unsigned slot_bits_;
  std::size_t bytes_;
  std::size_t first_line_;
  std::uint32_t n_;
  std::uint32_t within_;
  std::uint32_t window_ = 0;
  Region lines_;
  Before* before_ = nullptr;
  bool* lost_ = nullptr;
};

}  // namespace shoal
