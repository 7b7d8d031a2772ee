#include "text/cell.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <system_error>

#include "text/numbers.h"

namespace shoal::text {

namespace {

// ---- moments ---------------------------------------------------------------------------------------------

// The number of `count` digits; -1 if there are others.
inline int digits_at(Cursor p, int count) noexcept {
  int number = 0;
  for (int i = 0; i < count; ++i) {
    if (!is_digit(p[i])) {
      return -1;
    }
    number = number * 10 + (p[i] - '0');
  }
  return number;
}

bool all_digits(Cursor p, Cursor stop) noexcept { return std::all_of(p, stop, is_digit); }

// Whether eight bytes are a time: 12:34:56.
bool is_time(Cursor p) noexcept {
  return p[2] == ':' && p[5] == ':' && digits_at(p, 2) >= 0 && digits_at(p + 3, 2) >= 0 &&
         digits_at(p + 6, 2) >= 0;
}

struct Date {
  std::int64_t year;
  std::int64_t month;
  std::int64_t day;
};

// Days since 0000-03-01 of the Gregorian calendar, and back (H. Hinnant, days_from_civil, civil_from_days).
std::int64_t days_of(Date date) noexcept {
  const std::int64_t y = date.year - (date.month <= 2 ? 1 : 0);
  const std::int64_t era = (y >= 0 ? y : y - 399) / 400;
  const std::int64_t of_era = y - era * 400;
  const std::int64_t shifted = date.month > 2 ? date.month - 3 : date.month + 9;
  const std::int64_t of_year = (153 * shifted + 2) / 5 + date.day - 1;
  return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
}
Date date_of(std::int64_t days) noexcept {
  const std::int64_t era = (days >= 0 ? days : days - 146096) / 146097;
  const std::int64_t of_era = days - era * 146097;
  const std::int64_t year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
  const std::int64_t of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
  const std::int64_t shifted = (5 * of_year + 2) / 153;
  const std::int64_t month = shifted < 10 ? shifted + 3 : shifted - 9;
  return {year_of_era + era * 400 + (month <= 2 ? 1 : 0), month, of_year - (153 * shifted + 2) / 5 + 1};
}

void put_digits(std::uint8_t* to, std::int64_t number, int count) noexcept {
  for (int i = count - 1; i >= 0; --i) {
    to[i] = static_cast<std::uint8_t>('0' + number % 10);
    number /= 10;
  }
}

// Nothing, Z, or +hh, +hhmm or +hh:mm, as minutes ahead of UTC; none if it is something else.
std::optional<int> read_zone(Cursor p, Cursor stop) noexcept {
  if (p == stop || (stop - p == 1 && *p == 'Z')) {
    return 0;
  }
  if (*p != '+' && *p != '-') {
    return std::nullopt;
  }
  int minute = 0;
  if (stop - p == 6 && p[3] == ':') {
    minute = digits_at(p + 4, 2);
  } else if (stop - p == 5) {
    minute = digits_at(p + 3, 2);
  } else if (stop - p != 3) {
    return std::nullopt;
  }
  const int hour = digits_at(p + 1, 2);
  if (hour < 0 || hour >= 24 || minute < 0 || minute >= 60) {
    return std::nullopt;
  }
  return (hour * 60 + minute) * (*p == '-' ? -1 : 1);
}

// Writes a date and a time in UTC: without zeros at the end, and the date alone at midnight. Returns its
// size, 0 if the text is none.
std::size_t put_moment(Cursor p, std::size_t n, CellRoom& room) noexcept {
  if (!is_dated(p, n) || (p[10] != ' ' && p[10] != 'T')) {
    return 0;
  }
  Date date{digits_at(p, 4), digits_at(p + 5, 2), digits_at(p + 8, 2)};
  const int hour = digits_at(p + 11, 2);
  const int minute = digits_at(p + 14, 2);
  const int second = digits_at(p + 17, 2);
  if (date.year < 1 || date.month < 1 || date.month > 12 || date.day < 1 || date.day > 31) {
    return 0;
  }
  if (hour < 0 || hour >= 24 || minute < 0 || minute >= 60 || second < 0 || second >= 60) {
    return 0;
  }
  const Cursor stop = p + n;
  const Cursor fraction = p + 19;
  Cursor last = fraction;
  if (fraction < stop && *fraction == '.') {
    last = std::find_if_not(fraction + 1, stop, is_digit);
    if (last - fraction < 2 || last - fraction > 10) {
      return 0;
    }
  }
  const std::optional<int> ahead = read_zone(last, stop);
  if (!ahead) {
    return 0;
  }
  std::int64_t minutes = hour * 60 + minute - *ahead;
  std::int64_t days = days_of(date);
  // The 31st of a shorter month.
  if (days_of({date.year + date.month / 12, date.month % 12 + 1, 1}) <= days) {
    return 0;
  }
  if (minutes < 0 || minutes >= 1440) {
    days += minutes >= 1440 ? 1 : -1;
    minutes -= minutes >= 1440 ? 1440 : -1440;
    date = date_of(days);
    if (date.year < 1 || date.year > 9999) {
      return 0;
    }
  }
  std::uint8_t* const out = room.data();
  put_digits(out, date.year, 4);
  put_digits(out + 5, date.month, 2);
  put_digits(out + 8, date.day, 2);
  out[4] = out[7] = '-';
  while (last > fraction && last[-1] == '0') {
    --last;
  }
  if (last == fraction + 1) {
    last = fraction;
  }
  if (minutes == 0 && second == 0 && last == fraction) {
    return 10;
  }
  out[10] = ' ';
  put_digits(out + 11, minutes / 60, 2);
  put_digits(out + 14, minutes % 60, 2);
  put_digits(out + 17, second, 2);
  out[13] = out[16] = ':';
  std::copy(fraction, last, out + 19);
  return 19 + static_cast<std::size_t>(last - fraction);
}

// ---- numbers ---------------------------------------------------------------------------------------------

// Writes a finite number.
std::size_t put_number(double number, NumberRoom& out) noexcept {
  const double size = number < 0 ? -number : number;
  if (size < 18446744073709551616.0 && size == static_cast<double>(static_cast<std::uint64_t>(size))) {
    auto* const first = reinterpret_cast<char*>(out.data());
    char* to = first;
    if (number < 0) {
      *to++ = '-';
    }
    to = std::to_chars(to, first + out.size(), static_cast<std::uint64_t>(size)).ptr;
    return static_cast<std::size_t>(to - first);
  }
  std::array<char, 64> text;
  const char* const stop =
      std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::scientific).ptr;
  return plain_text(reinterpret_cast<Cursor>(text.data()), static_cast<std::size_t>(stop - text.data()), out);
}

// Writes the number in a text that ends as e+13; 0 if it holds none, or one of many digits.
std::size_t put_exponential(Cursor p, std::size_t n, CellRoom& out) noexcept {
  if (digits_at(p + n - 2, 2) < 0 || !(is_digit(*p) || (*p == '-' && is_digit(p[1])))) {
    return 0;
  }
  double number = 0.0;
  const auto* const stop = reinterpret_cast<const char*>(p + n);
  const auto [read, error] = std::from_chars(reinterpret_cast<const char*>(p), stop, number);
  if (read != stop || error == std::errc::result_out_of_range) {
    return 0;
  }
  NumberRoom text;
  const std::size_t size = put_number(number, text);
  if (size > out.size()) {
    return 0;
  }
  std::copy_n(text.begin(), size, out.begin());
  return size;
}

constexpr std::array<std::uint8_t, 4> kTrue = {'t', 'r', 'u', 'e'};
constexpr std::array<std::uint8_t, 5> kFalse = {'f', 'a', 'l', 's', 'e'};

// How many bytes of a text that ends in 0 count: fewer, where zeros stand behind a point of a whole number or
// of seconds.
std::size_t without_zeros(Cursor p, std::size_t n) noexcept {
  Cursor stop = p + n;
  while (stop > p && stop[-1] == '0') {
    --stop;
  }
  if (stop - p > 1 && stop[-1] == '.') {
    --stop;
    const Cursor first = *p == '-' ? p + 1 : p;
    if (stop - first == 8 && first == p && is_time(p)) {
      return 8;
    }
    if (first < stop && all_digits(first, stop) && (*first != '0' || stop - first == 1)) {
      return static_cast<std::size_t>(stop - p);
    }
    return n;
  }
  if (n > 9 && is_time(p) && p[8] == '.' && stop - p > 9 && all_digits(p + 9, p + n)) {
    return static_cast<std::size_t>(stop - p);
  }
  return n;
}

}  // namespace

CellText respelled(Cursor p, std::size_t n, Cursor end, CellRoom& room) noexcept {
  if (is_truth(p, n)) {
    return n == 4 ? CellText{kTrue.data(), n, kTrue.data() + n}
                  : CellText{kFalse.data(), n, kFalse.data() + n};
  }
  const auto in_room = [&](std::size_t size) {
    return CellText{room.data(), size, room.data() + room.size()};
  };
  if (n > 4 && (load2(p + n - 4) == 0x2b65U || load2(p + n - 4) == 0x2d65U)) {  // e+, e-
    const std::size_t size = put_exponential(p, n, room);
    return size > 0 ? in_room(size) : CellText{p, n, end};
  }
  const std::size_t size = n > 1 && p[n - 1] == '0' ? without_zeros(p, n) : n;
  if (size >= 19) {
    const std::size_t moment = put_moment(p, n, room);
    return moment > 0 ? in_room(moment) : CellText{p, size, end};
  }
  if (size == 2 && p[0] == '-' && p[1] == '0') {
    return {p + 1, 1, end};
  }
  return {p, size, end};
}

std::uint64_t unscrambled_respelled_key(std::uint64_t seed, Cursor p, std::size_t n, Cursor end) noexcept {
  CellRoom room;
  const CellText text = respelled(p, n, end, room);
  return unscrambled_key(seed, text.begin, text.size, text.end);
}

std::size_t number_text(double number, NumberRoom& out) noexcept {
  if (std::isfinite(number)) {
    return put_number(number, out);
  }
  const std::string_view text = std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  std::copy(text.begin(), text.end(), out.begin());
  return text.size();
}

std::size_t plain_text(Cursor p, std::size_t n, NumberRoom& out) noexcept {
  constexpr std::int64_t kMost = 390;
  const Cursor stop = p + n;
  const bool negative = n > 0 && *p == '-';
  if (n > 0 && (*p == '-' || *p == '+')) {
    ++p;
  }
  std::array<std::uint8_t, 400> found;
  std::size_t digits = 0;  // from the first that is not 0
  std::int64_t point = 0;  // the number is 0.ddd * 10^point
  bool behind = false;
  Cursor q = p;
  for (; q < stop && (is_digit(*q) || *q == '.'); ++q) {
    if (*q == '.') {
      behind = true;
    } else if (digits > 0 || *q != '0') {
      if (digits == found.size()) {
        return 0;
      }
      found[digits++] = *q;
      point += behind ? 0 : 1;
    } else if (behind) {
      --point;
    }
  }
  if (q == p) {
    return 0;
  }
  if (q < stop && (*q == 'e' || *q == 'E')) {
    ++q;
    const bool shrinks = q < stop && *q == '-';
    if (q < stop && (*q == '-' || *q == '+')) {
      ++q;
    }
    std::int64_t exponent = 0;
    for (; q < stop && is_digit(*q); ++q) {
      exponent = std::min(exponent * 10 + (*q - '0'), std::int64_t{1} << 20);
    }
    point += shrinks ? -exponent : exponent;
  }
  if (q != stop || point < -kMost || point > kMost) {
    return 0;
  }
  while (digits > 0 && found[digits - 1] == '0') {
    --digits;
  }
  std::uint8_t* to = out.data();
  if (digits == 0) {
    *to = '0';
    return 1;
  }
  if (negative) {
    *to++ = '-';
  }
  if (point <= 0) {
    *to++ = '0';
  }
  const auto count = static_cast<std::int64_t>(digits);
  for (std::int64_t i = std::min<std::int64_t>(point, 0); i < std::max(point, count); ++i) {
    if (i == point) {
      *to++ = '.';
    }
    *to++ = i >= 0 && i < count ? found[static_cast<std::size_t>(i)] : std::uint8_t{'0'};
  }
  return static_cast<std::size_t>(to - out.data());
}

Fault read_cell_number(Cursor p, std::size_t n, Cursor end, float& out) noexcept {
  Cursor stop = p + n;
  while (p < stop && is_blank(*p)) {
    ++p;
  }
  while (p < stop && is_blank(stop[-1])) {
    --stop;
  }
  // In a block a quote, separator or newline follows a cell and ends the number; an unquoted copy has no end.
  if (p == stop || stop == end) {
    return Fault::kValueText;
  }
  const Fault fault = read_number(p, end, out);
  return fault == Fault::kGood && p != stop ? Fault::kValueText : fault;
}

Fault read_number_of(std::span<const std::uint8_t> text, float& out) {
  // A newline ends the number.
  const auto read = [&](Cursor p) { return read_cell_number(p, text.size(), p + text.size() + 1, out); };
  if (text.size() < kNumberBytes) {
    NumberRoom copy;
    *std::copy(text.begin(), text.end(), copy.begin()) = '\n';
    return read(copy.data());
  }
  std::vector<std::uint8_t> copy(text.begin(), text.end());
  copy.push_back('\n');
  return read(copy.data());
}

MissingTexts::MissingTexts(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    if (text.empty()) {
      has_empty_ = true;
      continue;
    }
    firsts_[static_cast<std::uint8_t>(text[0])] |= kMissing;
    texts_.push_back(text);
  }
}

bool MissingTexts::finds(Cursor p, std::size_t n) const noexcept {
  const std::string_view cell(reinterpret_cast<const char*>(p), n);
  return std::find(texts_.begin(), texts_.end(), cell) != texts_.end();
}

}  // namespace shoal::text
