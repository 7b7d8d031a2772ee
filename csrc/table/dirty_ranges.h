// DirtyRanges: a dirty bitmap over a slot's hash space: the ranges with rows changed, inserted or erased
// since it was started.
//
//   range   the hashes of the slot with the same leading bits(): one of 2^bits() equal parts of the slot
//   words   one bit per range, and about one range per row: 2/3 to 4/3 of a bit per row, at least 64 bits
//
// Ranges are of hashes, not of storage: rows may move, and the slot may grow. As the number of rows grows,
// ranges are halved and every bit becomes two, so no change is lost. Without memory for that they keep their
// size, which costs only precision: a range may be marked although most of its rows are unchanged.
//
// Saved form: the ascending numbers of the marked ranges as uint32, or the words, whichever is shorter; the
// count determines which.
//
// Threads: not synchronized; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mix.h"

namespace shoal {

// Deltas are relative to the last save or to the last export; the ranges of each are recorded separately.
enum class Purpose : std::uint8_t { kSave, kExport };
inline constexpr std::size_t kPurposes = 2;

class DirtyRanges {
 public:
  static constexpr unsigned kMinBits = 6;
  static constexpr unsigned kMaxBits = 28;

  explicit DirtyRanges(Slots slots) : slot_bits_(slots.bits()), words_(1) {}
  // Restores what save() wrote: `count` marked ranges. Throws std::invalid_argument if save() cannot have
  // written it.
  DirtyRanges(Slots slots, unsigned bits, std::size_t count, std::span<const std::byte> saved);

  unsigned bits() const noexcept { return bits_; }
  bool any() const noexcept;
  std::size_t count() const noexcept;
  bool has(std::uint64_t hash) const noexcept {
    const std::size_t range = range_of(hash);
    return (words_[range / 64] >> (range % 64) & 1U) != 0;
  }

  // Calls use(first, last) for every run of adjacent marked ranges, in ascending order, with the positions of
  // its first and last hash. A position is a hash without its slot bits: hash << slots.bits().
  template <class Use>
  void each_run(const Use& use) const {
    const std::size_t end = words_.size() * 64;
    for (std::size_t first = find(true, 0); first != end;) {
      const std::size_t next = find(false, first);
      use(first_place(first), first_place(next) - 1);  // after the last range the position wraps to 0
      first = find(true, next);
    }
  }

  // Marks the ranges of the hashes, in a slot of `rows` rows.
  void add(std::span<const std::uint64_t> hashes, std::size_t rows) noexcept;
  // Adds the ranges of another object of the same slot.
  void add(const DirtyRanges& other) noexcept;

  // save() appends the saved form; saved_bytes() is its length.
  static std::size_t saved_bytes(unsigned bits, std::size_t count) noexcept;
  void save(std::vector<std::byte>& bytes) const;

 private:
  std::size_t range_of(std::uint64_t hash) const noexcept {
    return static_cast<std::size_t>((hash << slot_bits_) >> (64U - bits_));
  }
  std::uint64_t first_place(std::size_t range) const noexcept {
    return std::uint64_t{range} << (64U - bits_);
  }
  // The first range from `from` on that is marked (`named`) or not; the number of ranges if there is none.
  std::size_t find(bool named, std::size_t from) const noexcept;
  bool halve() noexcept;  // false: out of memory

  unsigned slot_bits_;
  unsigned bits_ = kMinBits;
  std::vector<std::uint64_t> words_;
};

}  // namespace shoal
