// EvictionCandidates: selects the rows of least rank in one slot (std::nth_element), ties broken by hash. The
// order is total, so the selection depends on the rows alone.
//
// The buffer is thread-local and reused. Only begin() allocates; call it where std::bad_alloc does no harm.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal {

// Maps non-negative numbers to integers in the same order.
inline std::uint64_t rank_of(double number) noexcept { return std::bit_cast<std::uint64_t>(number); }

class EvictionCandidates {
 public:
  struct Victim {
    std::uint64_t rank;
    std::uint64_t hash;
    friend auto operator<=>(const Victim&, const Victim&) = default;
  };

  // Starts a selection among up to `rows` rows.
  static void begin(std::size_t rows) {
    room_.clear();
    if (room_.capacity() < rows) {
      room_.reserve(rows + rows / 4);
    }
  }
  static void add(std::uint64_t rank, std::uint64_t hash) noexcept { room_.push_back({rank, hash}); }

  // The `count` rows of least rank, in unspecified order, or all if there are fewer. Valid until the next
  // begin().
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
