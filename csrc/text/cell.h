// The text of a cell with a value, and its key (docs/readers.md): one text for each value, whatever carried
// it, so that equal values have equal keys.
//
//   text      itself, but for what writers make of a boolean, a number and a moment:
//             True, TRUE -> true      17.0 -> 17      2.02405e+13 -> 20240500000000
//             2024-05-01T12:00:00.500000Z -> 2024-05-01 12:00:00.5
//   number    its shortest decimal digits, without an exponent; a whole number below 2^64 all of its digits
//
// Most texts are their own: a look at their ends decides it. A cell is at [p, p + n), and the bytes up to
// `end` may be read.
//
//   S1  A text that is not its own has 19 bytes or more, begins with T or F, or holds a point or a sign.
//
// Threads: functions of their arguments; a MissingTexts is immutable once made.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/bytes.h"
#include "text/fault.h"
#include "text/token_key.h"

namespace shoal::text {

inline constexpr std::size_t kCellBytes = 128;    // room for a text that is not the cell's own
inline constexpr std::size_t kNumberBytes = 800;  // room for a number of 400 digits

struct CellText {
  Cursor begin;
  std::size_t size;
  Cursor end;  // bytes up to here may be read
};

// ---- one text for each value -----------------------------------------------------------------------------

// Whether a text with these last four bytes may be another spelling: ".0", "00", "-0", "e+13" and "e-13".
constexpr bool ends_oddly(std::uint32_t last) noexcept {
  const std::uint32_t two = last >> 16U;
  return (two == 0x302eU) | (two == 0x3030U) | (two == 0x302dU) | ((last & 0xf9ffU) == 0x2965U);
}

// Whether a text is a boolean of another spelling.
inline bool is_truth(Cursor p, std::size_t n) noexcept {
  if (n == 4) {
    const std::uint32_t word = load4(p);
    return (word == 0x65757254U) | (word == 0x45555254U);  // True, TRUE
  }
  if (n == 5) {
    const std::uint32_t word = load4(p);
    return ((word == 0x736c6146U) & (p[4] == 'e')) | ((word == 0x534c4146U) & (p[4] == 'E'));  // False, FALSE
  }
  return false;
}

// Whether a text may be a moment: 2024-05-01 12:00:00.
inline bool is_dated(Cursor p, std::size_t n) noexcept {
  return n >= 19 && p[4] == '-' && p[7] == '-' && p[13] == ':' && p[16] == ':';
}

inline bool may_be_respelled(Cursor p, std::size_t n) noexcept {
  if (n < 4) {
    return n > 1 && p[n - 1] == '0' && !is_digit(p[n - 2]);
  }
  if (n < 6) {
    return ends_oddly(load4(p + n - 4)) || is_truth(p, n);
  }
  return ends_oddly(load4(p + n - 4)) || is_dated(p, n) || (n > 9 && p[2] == ':' && p[5] == ':');
}

using CellRoom = std::array<std::uint8_t, kCellBytes>;

// The text of a cell with this text, which may be in `room`.
CellText respelled(Cursor p, std::size_t n, Cursor end, CellRoom& room) noexcept;

inline CellText cell_text(Cursor p, std::size_t n, Cursor end, CellRoom& room) noexcept {
  return may_be_respelled(p, n) ? respelled(p, n, end, room) : CellText{p, n, end};
}

// ---- keys ------------------------------------------------------------------------------------------------

std::uint64_t unscrambled_respelled_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept;

// What becomes the key of a cell with this text by a last scramble, with seed = field_seed(field).
inline std::uint64_t unscrambled_cell_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept {
  if (may_be_respelled(p, n)) [[unlikely]] {
    return unscrambled_respelled_key(seed, p, n, end);
  }
  return unscrambled_key(seed, p, n, end);
}

// The key of a cell with this text.
inline std::uint64_t cell_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept {
  return scramble(unscrambled_cell_key(seed, p, n, end));
}

// ---- numbers ---------------------------------------------------------------------------------------------

using NumberRoom = std::array<std::uint8_t, kNumberBytes>;

// Writes the text of a cell that holds this number, and returns its size: nan, inf or -inf if not finite.
std::size_t number_text(double number, NumberRoom& out) noexcept;

// Writes the decimal number in a text without an exponent, and without zeros that say nothing; returns its
// size, 0 if the text is none or has more than 390 digits before or behind the point.
std::size_t plain_text(Cursor p, std::size_t n, NumberRoom& out) noexcept;

// The number in a cell, without the blanks around it: kValueText, kValueRange. The text must go on up to
// `end` as numbers.h says; kValueText if the cell ends there.
Fault read_cell_number(Cursor p, std::size_t n, Cursor end, float& out) noexcept;

// The same of a text by itself, such as a cell of a table.
Fault read_number_of(std::span<const std::uint8_t> text, float& out);

// ---- cells without a value -------------------------------------------------------------------------------

// The texts of cells that have no value, such as NA and the empty text.
class MissingTexts {
 public:
  // What a cell that begins with a byte may be.
  static constexpr std::uint8_t kMissing = 1;  // one of the texts
  static constexpr std::uint8_t kOdd = 2;      // of another spelling without a point or a sign: True, False

  MissingTexts() = default;
  explicit MissingTexts(const std::vector<std::string>& texts);

  bool has_empty() const noexcept { return has_empty_; }
  std::uint8_t beginning_with(std::uint8_t byte) const noexcept { return firsts_[byte]; }
  bool contains(Cursor p, std::size_t n) const noexcept {
    if (n == 0) {
      return has_empty_;
    }
    return (firsts_[*p] & kMissing) != 0 && finds(p, n);
  }

 private:
  static constexpr auto kNone = [] {
    std::array<std::uint8_t, 256> firsts{};
    firsts['T'] = firsts['F'] = kOdd;
    return firsts;
  }();

  bool finds(Cursor p, std::size_t n) const noexcept;

  std::vector<std::string> texts_;  // but for the empty one
  std::array<std::uint8_t, 256> firsts_ = kNone;
  bool has_empty_ = false;
};

}  // namespace shoal::text
