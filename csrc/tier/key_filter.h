// KeyFilter: which hashes a run may hold: a Bloom filter (Bloom, CACM 1970), blocked by cache line (Putze,
// Sanders, Singler, WEA 2007).
//
//   block   512 bits; the hash without its slot bits, scaled to the number of blocks, chooses one: a batch in
//           hash order reads the filter front to back
//   bits    kBits of a block, from nine bits each of a second mix of the hash
//
// 10 bits for each hash; of absent hashes it takes 1.3 % for present, because blocks fill unevenly (a filter
// that is not blocked: 0.8 %).
//
// Threads: not synchronized.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/memory.h"
#include "base/mix.h"

namespace shoal {

class KeyFilter {
 public:
  static constexpr std::size_t kBitsPerKey = 10;
  static constexpr unsigned kBits = 6;

  KeyFilter(unsigned slot_bits, std::size_t keys)
      : slot_bits_(slot_bits),
        blocks_(std::max<std::size_t>(1, (keys * kBitsPerKey + kBlockBits - 1) / kBlockBits)),
        words_(blocks_ * kCacheLine) {}

  std::size_t bytes() const noexcept { return words_.bytes(); }

  void add(std::uint64_t hash) noexcept {
    std::uint64_t* const at = block(hash);
    each_bit(hash, [&](std::size_t word, std::uint64_t bit) {
      at[word] |= bit;
      return true;
    });
  }
  // False: it was not added.
  bool may_have(std::uint64_t hash) const noexcept {
    const std::uint64_t* const at = block(hash);
    return each_bit(hash, [&](std::size_t word, std::uint64_t bit) { return (at[word] & bit) != 0; });
  }

 private:
  static constexpr std::size_t kBlockBits = 8 * kCacheLine;

  std::uint64_t* block(std::uint64_t hash) const noexcept {
    return reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(words_.data()) +
                                            scale(hash << slot_bits_, blocks_) * kCacheLine);
  }
  // Until use(word, bit) returns false.
  template <class Use>
  static bool each_bit(std::uint64_t hash, const Use& use) noexcept {
    std::uint64_t bits = mix(hash);
    for (unsigned k = 0; k < kBits; ++k, bits >>= 9U) {
      if (!use((bits >> 6U) & 7U, std::uint64_t{1} << (bits & 63U))) {
        return false;
      }
    }
    return true;
  }

  unsigned slot_bits_;
  std::size_t blocks_;
  Region words_;
};

}  // namespace shoal
