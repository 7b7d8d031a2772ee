// Keys of text: the fixed hash of (field, token), docs/readers.md.
//
// One scramble per eight bytes, the last eight overlapping the previous ones if the size is not a multiple
// of eight. The rounds are bijections, so tokens of one field and one length up to eight bytes never share a
// key. The last scramble is apart: a parser does it for all keys of a line in one loop (base/mix_block.h).

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/mix.h"
#include "text/bytes.h"

namespace shoal::text {

inline constexpr std::uint64_t kLength = 0x9e3779b97f4a7c15U;  // what a byte of a token adds to its seed

constexpr std::uint64_t field_seed(std::uint64_t field) noexcept { return mix(field); }

// What becomes the key of (field, token) by a last scramble, with seed = field_seed(field). The bytes up to
// `end` may be read.
inline std::uint64_t unscrambled_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept {
  std::uint64_t h = seed + n * kLength;
  if (n > 8) {
    for (std::size_t i = 0; i + 8 < n; i += 8) {
      h = scramble(h ^ load8(p + i));
    }
    return h ^ load8(p + n - 8);
  }
  std::uint64_t word = 0;
  if (end - p >= 8) {
    if (n > 0) {
      word = load8(p) & (~std::uint64_t{0} >> (64 - 8 * n));
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      word |= std::uint64_t{p[i]} << (8 * i);
    }
  }
  return h ^ word;
}

inline std::uint64_t token_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept {
  return scramble(unscrambled_key(seed, p, n, end));
}

// The same as unscrambled_key, for a token of which eight bytes may be read; `size` counts the token and the
// separator behind it.
inline std::uint64_t unscrambled_separated(std::uint64_t seed, Cursor p, std::size_t size,
                                           Cursor end) noexcept {
  // By the size, up to 9.
  static constexpr std::array<std::uint64_t, 10> kLowBytes = {0,
                                                              0,
                                                              0xff,
                                                              0xffff,
                                                              0xffffff,
                                                              0xffffffff,
                                                              0xffffffffff,
                                                              0xffffffffffff,
                                                              0xffffffffffffff,
                                                              0xffffffffffffffff};
  static constexpr std::array<std::uint64_t, 10> kLengths = {
      0,           0,           kLength,     2 * kLength, 3 * kLength,
      4 * kLength, 5 * kLength, 6 * kLength, 7 * kLength, 8 * kLength};
  if (size > 9) [[unlikely]] {
    return unscrambled_key(seed, p, size - 1, end);
  }
  return (seed + kLengths[size]) ^ (load8(p) & kLowBytes[size]);
}

}  // namespace shoal::text
