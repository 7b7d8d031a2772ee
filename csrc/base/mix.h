// Keys, hashes and slots: the one order that all tables, files and messages follow.
//
//   key --mix--> hash       a fixed bijection of 64 bits, so no key is reserved and no two keys collide
//   slot  = top bits of the hash           the unit that locks, grows, moves and is saved
//   place = next bits of the hash          a position inside the slot's own table
//
// Sorting by hash sorts by slot first and by place inside the slot next, for any number of slots and any size
// of a slot's table: place() is monotone in the hash.
//
// mix is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators", OOPSLA'14; constants by Stafford, variant 13). tests/cpp/mix_test.cc pins it: a changed
// mix would scramble every checkpoint ever written.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"

namespace shoal {

enum class Slot : std::uint32_t {};

constexpr std::uint32_t index_of(Slot slot) noexcept { return static_cast<std::uint32_t>(slot); }

// The finalizer of mix: a bijection that keeps 0.
constexpr std::uint64_t scramble(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

constexpr std::uint64_t mix(std::uint64_t key) noexcept { return scramble(key + 0x9e3779b97f4a7c15U); }

// The inverse of mix: each xor-shift is undone by repeating it, each product by the odd factor's inverse
// modulo 2^64.
constexpr std::uint64_t unmix(std::uint64_t hash) noexcept {
  std::uint64_t x = hash;
  x = (x ^ (x >> 31U) ^ (x >> 62U)) * 0x319642b2d24d8ec3U;
  x = (x ^ (x >> 27U) ^ (x >> 54U)) * 0x96de1b173f119089U;
  x = x ^ (x >> 30U) ^ (x >> 60U);
  return x - 0x9e3779b97f4a7c15U;
}

// The partition of the hash space: a power of two of slots, fixed for the lifetime of a store.
class Slots {
 public:
  static constexpr std::size_t kMin =
      2;  // a table marks empty cells by the hash's slot bits, so at least one is needed
  static constexpr std::size_t kMax =
      16384;  // a slot takes up to two mappings, and Linux gives a process 65530

  explicit Slots(std::size_t count) : bits_(static_cast<unsigned>(std::bit_width(count)) - 1U) {
    SHOAL_CHECK(count >= kMin && count <= kMax && std::has_single_bit(count),
                "slots must be a power of two from 2 to 16384, got " + std::to_string(count));
  }

  std::size_t count() const noexcept { return std::size_t{1} << bits_; }
  unsigned bits() const noexcept { return bits_; }
  Slot of(std::uint64_t hash) const noexcept {
    return Slot{static_cast<std::uint32_t>(hash >> (64U - bits_))};
  }
  // The least hash of a slot.
  std::uint64_t first_hash(Slot slot) const noexcept {
    return std::uint64_t{index_of(slot)} << (64U - bits_);
  }

  friend bool operator==(const Slots&, const Slots&) = default;

 private:
  unsigned bits_;
};

// The high half of a 128-bit product: scales a fraction (x of 2^64) to 0..n-1, monotone in x.
constexpr std::uint64_t scale(std::uint64_t x, std::uint64_t n) noexcept {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(x) * n) >> 64U);
}

}  // namespace shoal
