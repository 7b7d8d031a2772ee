// Histogram: counts of small integers, exact up to 15, then by power of two.
//
//   0 1 2 ... 15 | 16-31 | 32-63 | ... | 2^63 and more
//
// Threads: none of its own; one owner.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace shoal {

class Histogram {
 public:
  static constexpr std::size_t kExact = 16;
  static constexpr std::size_t kBuckets = kExact + 60;

  void add(std::uint64_t x) noexcept { ++counts_[bucket(x)]; }
  void clear() noexcept { counts_.fill(0); }

  std::uint64_t count(std::size_t bucket) const noexcept { return counts_[bucket]; }
  // The least number that a bucket counts.
  static std::uint64_t lower_bound(std::size_t bucket) noexcept {
    return bucket < kExact ? bucket : std::uint64_t{1} << (bucket - kExact + 4);
  }

 private:
  static std::size_t bucket(std::uint64_t x) noexcept {
    return x < kExact ? x : kExact + static_cast<std::size_t>(std::bit_width(x)) - 5;
  }
  std::array<std::uint64_t, kBuckets> counts_{};
};

}  // namespace shoal
