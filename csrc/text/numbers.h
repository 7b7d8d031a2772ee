// Numbers in text: decimal numbers as float32, and whole ones of 64 bits.
//
// Each function advances `cursor` past the number that it read, and returns a fault, at which `cursor` stands
// or from which it has not moved. The text must go on, up to `end`, behind the number: by a newline at least.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "text/bytes.h"
#include "text/fault.h"

namespace shoal::text {

// A decimal number without a sign, by std::from_chars; one that is too small becomes 0. It is not inlined.
Fault read_number_slowly(Cursor& cursor, Cursor end, float& out) noexcept;

// [+-] digits [. digits] [e [+-] digits] as the nearest float32.
//
// Fast path (Clinger): with the digits as an integer w of at most 19 digits and a power of ten that is exact
// as a double, w / 10^k takes two roundings, so it is within 2 ulp of the true value. Rounding that double to
// float32 is correct unless it is that close to the midpoint of two floats; these few take the slow path.
inline Fault read_number(Cursor& cursor, Cursor end, float& out) noexcept {
  // Powers of ten that a double holds exactly.
  static constexpr std::array<double, 23> kTen = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                  1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                                  1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
  Cursor p = cursor;
  const bool negative = *p == '-';
  if (*p == '-' || *p == '+') {
    ++p;
  }
  const Cursor first = p;
  std::uint64_t w = 0;
  for (; is_digit(*p); ++p) {
    w = w * 10 + (*p - std::uint64_t{'0'});
  }
  std::int64_t digits = p - first;
  std::int64_t power = 0;
  if (*p == '.') {
    ++p;
    const Cursor point = p;
    for (; is_digit(*p); ++p) {
      w = w * 10 + (*p - std::uint64_t{'0'});
    }
    power = point - p;
    digits -= power;
  }
  if (digits == 0) {
    return Fault::kValueText;
  }
  if (*p == 'e' || *p == 'E') {
    const Cursor mark = p;
    ++p;
    const bool shrinks = *p == '-';
    if (*p == '-' || *p == '+') {
      ++p;
    }
    if (!is_digit(*p)) {
      cursor = mark;
      return Fault::kValueText;
    }
    std::int64_t exponent = 0;
    for (; is_digit(*p); ++p) {
      exponent = std::min<std::int64_t>(exponent * 10 + (*p - '0'), 9999);
    }
    power += shrinks ? -exponent : exponent;
  }
  if (digits <= 19 && power >= -22 && power <= 10) {
    auto d = static_cast<double>(w);
    if (power < 0) {
      d /= kTen[static_cast<std::size_t>(-power)];
    } else if (power > 0) {
      d *= kTen[static_cast<std::size_t>(power)];
    }
    // 29 bits are lost on the way to float32; 0x10000000 in them is the midpoint.
    if ((std::bit_cast<std::uint64_t>(d) & 0x1fffffffU) - std::uint64_t{0x0ffffffcU} > 8) {
      out = negative ? -static_cast<float>(d) : static_cast<float>(d);
      cursor = p;
      return Fault::kGood;
    }
  }
  // Copies, so that what the compiler keeps in registers need not be in memory.
  Cursor slow = first;
  float number = 0.0F;
  const Fault fault = read_number_slowly(slow, end, number);
  if (fault == Fault::kGood) {
    out = negative ? -number : number;
  }
  cursor = slow;
  return fault;
}

// The number that the first 1 to 8 digits of a word make: digits without the bits of '0', the first one lowest.
inline std::uint64_t number_of_digits(std::uint64_t word, int count) noexcept {
  word <<= 64 - 8 * count;  // the digits before the first are zeros
  word = word * 10 + (word >> 8);
  return ((word & 0x000000ff000000ffU) * 0x000f424000000064U +
          ((word >> 16) & 0x000000ff000000ffU) * 0x0000271000000001U) >>
         32;
}

// Digits as an unsigned number, the first eight in parallel (SWAR): kKeyText, kKeyRange.
inline Fault read_key(Cursor& cursor, Cursor end, std::uint64_t& out) noexcept {
  const Cursor first = cursor;
  Cursor p = first;
  std::uint64_t key = 0;
  if (end - p >= 8) {
    std::uint64_t word = load8(p) ^ 0x3030303030303030U;
    const int count = std::countr_zero(others_than_digits(word)) >> 3;  // 8 if there are digits alone
    if (count == 0) {
      return Fault::kKeyText;
    }
    key = number_of_digits(word, count);
    p += count;
  }
  for (; is_digit(*p); ++p) {
    key = key * 10 + (*p - std::uint64_t{'0'});
  }
  if (p - first > 19) {  // 10^19 - 1 fits, so only a longer number may have wrapped
    key = 0;
    for (p = first; is_digit(*p); ++p) {
      const std::uint64_t digit = *p - std::uint64_t{'0'};
      if (key > (std::numeric_limits<std::uint64_t>::max() - digit) / 10) {
        return Fault::kKeyRange;
      }
      key = key * 10 + digit;
    }
  }
  if (p == first) {
    return Fault::kKeyText;
  }
  cursor = p;
  out = key;
  return Fault::kGood;
}

// [+-] digits as a signed number: kIntegerText, kIntegerRange.
inline Fault read_integer(Cursor& cursor, Cursor end, std::int64_t& out) noexcept {
  Cursor p = cursor;
  const bool negative = *p == '-';
  if (*p == '-' || *p == '+') {
    ++p;
  }
  std::uint64_t magnitude = 0;
  const Fault fault = read_key(p, end, magnitude);
  if (fault == Fault::kKeyText) {
    return Fault::kIntegerText;
  }
  if (fault == Fault::kKeyRange || magnitude > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
    return Fault::kIntegerRange;
  }
  const auto v = static_cast<std::int64_t>(magnitude);
  out = negative ? -v : v;
  cursor = p;
  return Fault::kGood;
}

// A whole number of up to four digits, no digits being 0; false if there is anything else. `size` counts the
// separator behind them too, up to 5. Four bytes may be read from `p`.
inline bool read_small_integer(Cursor p, std::size_t size, std::uint32_t& out) noexcept {
  // The product with it moves the text to the upper end of a word, zeros below.
  static constexpr std::array<std::uint32_t, 6> kToTop = {0, 0, 1U << 24U, 1U << 16U, 1U << 8U, 1};
  std::uint32_t word = (load4(p) ^ 0x30303030U) * kToTop[size];
  if (others_than_digits(word) != 0) {
    return false;
  }
  word = word * 10 + (word >> 8U);  // two numbers of two digits
  out = ((word & 0x00ff00ffU) * 0x00640001U) >> 16U;
  return true;
}

}  // namespace shoal::text
