// TagBucket: the numbers of up to kWays hashes, in one cache line.
//
// A hash is a byte here, its tag (as in Swiss tables: Kulukundis, CppCon 2017), and all tags are compared at
// once. So a number is a hint: another hash may have the tag, and the caller looks where the number leads.
//
// Invariant: ways are used from the first one on and never freed. All zero: no way is used.
//
// Threads: none of its own.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/memory.h"

namespace shoal {

struct alignas(kCacheLine) TagBucket {
  static constexpr std::size_t kWays = 8;
  static constexpr std::uint32_t kNone = 0;  // the number of no hash

  std::uint64_t tags;                        // a byte for each way
  std::array<std::uint32_t, kWays> numbers;  // kNone: the way is free
  std::uint32_t none;                        // kNone: what no tag leads to
  std::uint8_t used;                         // ways
  // Of the owner: for replacement.
  std::uint8_t next_victim;
  std::uint8_t refused;

  // Of the low bits of a hash, since the high ones choose the bucket.
  static std::uint64_t tag_of(std::uint64_t hash) noexcept { return hash & 0xffU; }

  // The number of the first way with the tag of a hash, or kNone.
  std::uint32_t first(std::uint64_t hash) const noexcept {
    static_assert(offsetof(TagBucket, none) == offsetof(TagBucket, numbers) + kWays * sizeof none);
    const auto* const first_number = reinterpret_cast<const std::byte*>(this) + offsetof(TagBucket, numbers);
    std::uint32_t number;  // without a match `none`, without a branch
    std::memcpy(&number, first_number + way_of(matches(hash)) * sizeof number, sizeof number);
    return number;
  }

  // The number of the way with the tag of a hash for which is_it(number), or kNone.
  template <class Test>
  std::uint32_t find(std::uint64_t hash, const Test& is_it) const noexcept {
    for (std::uint64_t left = matches(hash); left != 0; left &= left - 1) {
      const std::uint32_t number = numbers[way_of(left)];
      if (number != kNone && is_it(number)) {
        return number;
      }
    }
    return kNone;
  }

  void set(std::size_t way, std::uint64_t hash) noexcept {
    tags = (tags & ~(std::uint64_t{0xff} << (8 * way))) | tag_of(hash) << (8 * way);
  }

 private:
  // Sets the high bit of each byte that is the tag, and perhaps of bytes above the first such one.
  std::uint64_t matches(std::uint64_t hash) const noexcept {
    constexpr std::uint64_t kOnes = 0x0101010101010101U;
    const std::uint64_t other = tags ^ (tag_of(hash) * kOnes);
    return (other - kOnes) & ~other & (kOnes << 7U);
  }
  // kWays: none.
  static std::size_t way_of(std::uint64_t matches) noexcept {
    return static_cast<std::size_t>(std::countr_zero(matches)) / 8;
  }
};
static_assert(sizeof(TagBucket) == kCacheLine);

}  // namespace shoal
