// Bloom: approximate occurrence counts of keys that wait for a row, in fixed memory: a counting Bloom filter
// (Bloom, CACM 1970; Fan et al., SIGCOMM'98), blocked by cache line (Putze, Sanders, Singler, WEA 2007).
//
//   filter  one array of lines for the whole table, in the order of the hash: a slot holds the lines of its
//           units
//   line    128 counters of 4 bits, or 64 of 8 bits if n is above 15; a key has hashes() of them
//   count   the minimum of a key's counters. An occurrence raises only the counters below the new count
//           (conservative update: Estan, Varghese, SIGCOMM'02)
//
// A count is never too low: a key may be admitted early, never late. Lines follow the hash and not the slot,
// so a filter that was saved with one number of slots is restored exactly with another. With `within`, a
// slot's filter is cleared in each new window of `within` clocks.
//
// Threads: not synchronized; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "base/memory.h"
#include "base/mix.h"
#include "policy/lifecycle.h"
#include "table/pre_image_log.h"

namespace shoal {

// The parameters that the filters of a table's slots share.
class BloomShape {
 public:
  static constexpr std::size_t kUnits = Slots::kMax;
  static constexpr unsigned kUnitBits = 14;
  static constexpr std::size_t kMaxHashes = 8;

  // The smallest filter whose error is at most the rule's when it holds as many keys as its capacity.
  explicit BloomShape(const Admission& rule);

  std::size_t lines_per_unit() const noexcept { return lines_per_unit_; }
  std::size_t hashes() const noexcept { return hashes_; }
  bool wide() const noexcept { return wide_; }  // counters of 8 bits
  std::size_t slot_bytes(Slots slots) const noexcept {
    return kUnits / slots.count() * lines_per_unit_ * kCacheLine;
  }
  // Number of a hash's line in the table.
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

  // Allocates the lines on the first call. Call it before ask().
  void make_room() { lines_.resize(bytes_); }
  // Counts `count` occurrences of a key without a row. Returns true if the key gets a row.
  bool ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  void sweep(std::uint32_t now) noexcept;

  // Writes the window as uint32, 4 zero bytes, and the lines; nothing if no lines were allocated.
  void save(std::vector<std::byte>& bytes) const;
  // Restores the lines of a saved slot, of any number of slots, that belong to this one. Requires
  // make_room().
  static constexpr std::size_t kHead = 8;
  void restore(Slots cut, Slot slot, std::span<const std::byte> bytes) noexcept;

  // Into a new filter: u32 window | u8 whether there are lines | the lines.
  void restore_all(ByteReader& in);

  // The filter at the moment a save began: all lines if it was cleared since, else those that have changed.
  struct Before {
    std::uint32_t window = 0;
    bool had_lines = false;
    bool anew = false;
    Region lines;
    PreImageLog changed;
  };
  // During a save, previous contents are logged in `before`: by log(), which is called with ascending hashes
  // before ask(), and when the filter is cleared. `lost` is set if memory for that runs out. Null ends it.
  void watch(Before* before, bool* lost) noexcept;
  void log(std::span<const std::uint64_t> hashes);
  const Region& lines() const noexcept { return lines_; }
  // As save(), of `lines`, a copy of lines(), overlaid with the logged ones. Reads nothing that changes.
  void save(const Before& before, std::span<std::byte> lines, std::vector<std::byte>& bytes) const;

 private:
  // The key of a line in the PreImageLog.
  std::uint64_t name_of(std::size_t line) const noexcept;
  std::size_t line_named(std::uint64_t name) const noexcept;
  unsigned name_shift() const noexcept;
  std::byte* line(std::uint64_t hash) const noexcept;
  // Clears the filter if `window` is newer than its window.
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
