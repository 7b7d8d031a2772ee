// The bytes of a text: classes of bytes, words of several, and the search for one of them.
//
// A Cursor is a position in a block of whole lines. A newline ends every loop over bytes, so no loop tests
// whether bytes are left; words are read only where eight (or four) bytes are left.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace shoal::text {

static_assert(std::endian::native == std::endian::little, "keys of text are defined on little-endian words");

using Cursor = const std::uint8_t*;

constexpr bool is_digit(std::uint8_t c) noexcept { return static_cast<std::uint8_t>(c - '0') <= 9; }
constexpr bool is_blank(std::uint8_t c) noexcept { return c == ' ' || c == '\t' || c == '\r'; }
constexpr bool ends_token(std::uint8_t c) noexcept { return is_blank(c) || c == '\n' || c == '#'; }

inline std::span<const std::uint8_t> bytes_of(std::string_view text) noexcept {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

inline std::uint64_t load8(Cursor p) noexcept {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}
inline std::uint32_t load4(Cursor p) noexcept {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}
inline std::uint32_t load2(Cursor p) noexcept {
  std::uint16_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Words in which every byte but a digit's value, 0 to 9, sets its top bit; so may the byte above it, by the
// carry, which does not matter: the lowest one counts, or whether there is any.
constexpr std::uint64_t others_than_digits(std::uint64_t word) noexcept {
  return ((word + 0x7676767676767676U) | word) & 0x8080808080808080U;
}
constexpr std::uint32_t others_than_digits(std::uint32_t word) noexcept {
  return ((word + 0x76767676U) | word) & 0x80808080U;
}

// The next newline: there is one.
inline Cursor newline(Cursor p, Cursor end) noexcept {
  return static_cast<Cursor>(std::memchr(p, '\n', static_cast<std::size_t>(end - p)));
}

// Whether a line without text begins at `p`.
inline bool is_blank_line(Cursor p) noexcept { return *p == '\n' || (*p == '\r' && p[1] == '\n'); }

// The next such byte or newline: there is one.
inline Cursor byte_or_newline(Cursor p, Cursor end, std::uint8_t byte) noexcept {
  constexpr std::uint64_t kOnes = 0x0101010101010101U;
  constexpr std::uint64_t kTops = 0x8080808080808080U;
  for (; end - p >= 8; p += 8) {
    const std::uint64_t word = load8(p);
    const std::uint64_t sought = word ^ (kOnes * byte);
    const std::uint64_t lines = word ^ (kOnes * '\n');
    // A zero byte sets its top bit. So may a byte above a zero byte: the lowest one counts.
    const std::uint64_t found = ((sought - kOnes) & ~sought & kTops) | ((lines - kOnes) & ~lines & kTops);
    if (found != 0) {
      return p + (std::countr_zero(found) >> 3);
    }
  }
  while (*p != byte && *p != '\n') {
    ++p;
  }
  return p;
}

}  // namespace shoal::text
