#include "text/numbers.h"

#include <charconv>
#include <system_error>

namespace shoal::text {

namespace {

// Whether a decimal number that float32 cannot hold is too large; otherwise it is too small.
bool is_large(Cursor p) noexcept {
  std::int64_t scale = 0;  // the number is 0.ddd * 10^scale, once the exponent is added
  bool point = false;
  bool leading = true;
  for (; is_digit(*p) || *p == '.'; ++p) {
    if (*p == '.') {
      point = true;
      continue;
    }
    leading = leading && *p == '0';
    if (!point && !leading) {
      ++scale;
    } else if (point && leading) {
      --scale;
    }
  }
  if (*p == 'e' || *p == 'E') {
    ++p;
    const bool shrinks = *p == '-';
    if (*p == '-' || *p == '+') {
      ++p;
    }
    std::int64_t exponent = 0;
    for (; is_digit(*p); ++p) {
      exponent = std::min(exponent * 10 + (*p - '0'), std::int64_t{1} << 40);
    }
    scale += shrinks ? -exponent : exponent;
  }
  return scale > 0;
}

}  // namespace

Fault read_number_slowly(Cursor& cursor, Cursor end, float& out) noexcept {
  const Cursor first = cursor;
  const auto* const begin = reinterpret_cast<const char*>(first);
  const auto [stop, error] = std::from_chars(begin, reinterpret_cast<const char*>(end), out);
  cursor = first + (stop - begin);
  // For numbers too large and too small alike, and `out` is as before.
  if (error == std::errc::result_out_of_range) {
    if (is_large(first)) {
      return Fault::kValueRange;
    }
    out = 0.0F;
  }
  return Fault::kGood;
}

}  // namespace shoal::text
