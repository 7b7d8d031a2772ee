// DirtyRanges: which parts of a slot's hashes have rows that were changed, made or erased since some moment.
//
//   a range   the hashes of the slot that begin alike: one of 2^bits() equal parts of it
//   words     one bit a range, and about one range a row: 2/3 to 4/3 of a bit, 64 at least
//
// Idea. By hash, not by where rows stand: they may move, and the slot may grow. As its rows become more, ranges are
// halved, and every bit becomes two; nothing is forgotten. Where there is no memory for that they stay as they are, which
// costs accuracy alone: a range that is named has changed, perhaps.
//
// Saved, ranges are either a list of their numbers, uint32, ascending, or the words: whichever is shorter, which their
// count tells.
//
// Threads: none of its own; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mix.h"

namespace shoal {

// Whose deltas ranges are kept for: saves and exports know each what has changed since their own last one.
enum class Purpose : std::uint8_t { kSave, kExport };
inline constexpr std::size_t kPurposes = 2;

class DirtyRanges {
 public:
  static constexpr unsigned kMinBits = 6;
  static constexpr unsigned kMaxBits = 28;

  explicit DirtyRanges(Slots slots) : slot_bits_(slots.bits()), words_(1) {}
  // As it was saved: of so many ranges. std::invalid_argument where nobody can have saved that.
  DirtyRanges(Slots slots, unsigned bits, std::size_t count, std::span<const std::byte> saved);

  unsigned bits() const noexcept { return bits_; }
  bool any() const noexcept;
  std::size_t count() const noexcept;
  bool has(std::uint64_t hash) const noexcept {
    const std::size_t range = range_of(hash);
    return (words_[range / 64] >> (range % 64) & 1U) != 0;
  }

  // use(first, last) for every run of neighbouring ranges, in ascending order: the places of its first and its last hash.
  // A place is a hash without its slot's bits, hash << slots.bits().
  template <class Use>
  void each_run(const Use& use) const {
    const std::size_t end = words_.size() * 64;
    for (std::size_t first = find(true, 0); first != end;) {
      const std::size_t next = find(false, first);
      use(first_place(first), first_place(next) - 1);  // behind the last range places begin anew at 0
      first = find(true, next);
    }
  }

  // Of a slot of `rows` rows.
  void add(std::span<const std::uint64_t> hashes, std::size_t rows) noexcept;
  // What another of this slot has.
  void add(const DirtyRanges& other) noexcept;

  // Its bytes, as above, appended: how many.
  static std::size_t saved_bytes(unsigned bits, std::size_t count) noexcept;
  void save(std::vector<std::byte>& bytes) const;

 private:
  std::size_t range_of(std::uint64_t hash) const noexcept {
    return static_cast<std::size_t>((hash << slot_bits_) >> (64U - bits_));
  }
  std::uint64_t first_place(std::size_t range) const noexcept {
    return std::uint64_t{range} << (64U - bits_);
  }
  // The first range from `from` on that is named, or is not; else how many ranges there are.
  std::size_t find(bool named, std::size_t from) const noexcept;
  bool halve() noexcept;  // false: there is no memory

  unsigned slot_bits_;
  unsigned bits_ = kMinBits;
  std::vector<std::uint64_t> words_;
};

}  // namespace shoal
