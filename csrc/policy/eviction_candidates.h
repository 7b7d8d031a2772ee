// EvictionCandidates: what goes first in one slot, by rank and of equal ranks by hash: a total order, so who goes depends on
// the rows alone.
//
// The room to choose in belongs to the thread, which keeps it. Begin where running out of memory does no harm: the rest takes
// none.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal {

// Numbers that are not negative, in their order.
inline std::uint64_t rank_of(double number) noexcept { return std::bit_cast<std::uint64_t>(number); }

class EvictionCandidates {
 public:
  struct Victim {
    std::uint64_t rank;
    std::uint64_t hash;
    friend auto operator<=>(const Victim&, const Victim&) = default;
  };

  // A new choice among up to `rows`.
  static void begin(std::size_t rows) {
    room_.clear();
    if (room_.capacity() < rows) {
      room_.reserve(rows + rows / 4);
    }
  }
  static void add(std::uint64_t rank, std::uint64_t hash) noexcept { room_.push_back({rank, hash}); }

  // The `count` of least rank, in no order; fewer where there are no more. Good until the next begin().
  static std::span<const Victim> take(std::size_t count) noexcept {
    if (count < room_.size()) {
      std::nth_element(room_.begin(), room_.begin() + static_cast<std::ptrdiff_t>(count), room_.end());
      return std::span<const Victim>(room_).first(count);
    }
    return room_;
  }

 private:
  static inline thread_local std::vector<Victim> room_;
};

}  // namespace shoal
