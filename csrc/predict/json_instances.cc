#include "predict/json_instances.h"

#include <algorithm>
#include <array>
#include <bit>
#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/parse_options.hpp>
#include <boost/system/error_code.hpp>
#include <charconv>
#include <cstring>
#include <limits>
#include <span>

#include "predict/json.h"
#include "text/numbers.h"

namespace shoal::predict {

namespace {

using Error = boost::system::error_code;

// Where the parser is.
enum class Place {
  kStart,      // before the body
  kBody,       // among its members
  kMember,     // at the value of "instances"
  kText,       // at the value of another member
  kInstances,  // in the list
  kInstance,   // among the members of an instance
  kList,       // in a list of an instance
  kEnd,        // behind the body
};

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

constexpr const char* kBody = R"(the body is an object with "instances", a list)";

struct Handler {
  static constexpr std::size_t max_object_size = std::numeric_limits<std::size_t>::max();
  static constexpr std::size_t max_array_size = std::numeric_limits<std::size_t>::max();
  static constexpr std::size_t max_key_size = std::numeric_limits<std::size_t>::max();
  static constexpr std::size_t max_string_size = std::numeric_limits<std::size_t>::max();

  ExampleBuilder* into = nullptr;
  std::string_view allowed;
  Place place = Place::kStart;
  std::size_t skipped = 0;  // open lists and objects within a cell
  bool found = false;       // "instances"
  std::string parts;        // of a text or a name that has escapes

  bool in_keys() const { return place == Place::kList && skipped == 0 && into->in_keys(); }

  // A text whole, from its last part.
  std::string_view whole(std::string_view last) {
    if (parts.empty()) {
      return last;
    }
    parts += last;
    return parts;
  }

  void scalar(const Cell& cell) {
    switch (place) {
      case Place::kInstance:
      case Place::kList:
        if (skipped == 0) {
          into->cell(cell);
        }
        break;
      case Place::kInstances:
        if (cell.kind != Cell::Kind::kText) {
          into->refuse("an instance is an object or a line of text");
        }
        into->line(cell.text);
        break;
      case Place::kText:
        if (cell.kind != Cell::Kind::kText) {
          throw BadBody(in_quotes(allowed) + " is not a text");
        }
        place = Place::kBody;
        break;
      case Place::kMember:
      case Place::kStart:
      case Place::kBody:
      case Place::kEnd:
        throw BadBody(kBody);
    }
  }

  void number(std::string_view text, double value, std::uint64_t as_whole, bool fits) {
    Cell cell;
    cell.number = value;
    const std::string_view sign = text.starts_with('-') ? text.substr(0, 1) : std::string_view();
    const bool is_whole =
        std::all_of(text.begin() + static_cast<std::ptrdiff_t>(sign.size()), text.end(), is_digit);
    cell.kind = is_whole ? Cell::Kind::kWhole : Cell::Kind::kReal;
    cell.text = text == "-0" ? text.substr(1) : text;
    cell.whole = as_whole;
    cell.fits = fits;
    scalar(cell);
    parts.clear();
  }

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }

  bool on_object_begin(Error&) {
    if (skipped > 0) {
      ++skipped;
    } else if (place == Place::kStart) {
      place = Place::kBody;
    } else if (place == Place::kInstances) {
      into->begin();
      place = Place::kInstance;
    } else if (place == Place::kInstance || place == Place::kList) {
      Cell cell;
      cell.kind = Cell::Kind::kObject;
      into->cell(cell);  // refused, unless the column is passed over
      ++skipped;
    } else {
      throw BadBody(kBody);
    }
    return true;
  }

  bool on_object_end(std::size_t, Error&) {
    if (skipped > 0) {
      --skipped;
    } else if (place == Place::kInstance) {
      into->end();
      place = Place::kInstances;
    } else {
      place = Place::kEnd;
    }
    return true;
  }

  bool on_array_begin(Error&) {
    if (skipped > 0) {
      ++skipped;
    } else if (place == Place::kInstance) {
      into->begin_list();
      place = Place::kList;
    } else if (place == Place::kList) {
      into->begin_list();  // refused, unless the column is passed over
      ++skipped;
    } else if (place == Place::kMember) {
      place = Place::kInstances;
    } else if (place == Place::kInstances) {
      into->refuse("an instance is an object or a line of text, got a list");
    } else {
      throw BadBody(kBody);
    }
    return true;
  }

  bool on_array_end(std::size_t, Error&) {
    if (skipped > 0) {
      --skipped;
    } else if (place == Place::kList) {
      into->end_list();
      place = Place::kInstance;
    } else {
      place = Place::kBody;
    }
    return true;
  }

  bool on_key_part(std::string_view part, std::size_t, Error&) {
    parts += part;
    return true;
  }

  bool on_key(std::string_view last, std::size_t, Error&) {
    const std::string_view name = whole(last);
    if (skipped > 0) {
      // Within a cell that is passed over.
    } else if (place == Place::kInstance) {
      into->column(name);
    } else if (name == "instances") {
      if (found) {
        throw BadBody(R"("instances" are there twice)");
      }
      found = true;
      place = Place::kMember;
    } else if (name != allowed || allowed.empty()) {
      throw BadBody(in_quotes(name) + " is not known: " + kBody);
    } else {
      place = Place::kText;
    }
    parts.clear();
    return true;
  }

  bool on_string_part(std::string_view part, std::size_t, Error&) {
    parts += part;
    return true;
  }

  bool on_string(std::string_view last, std::size_t, Error&) {
    scalar(Cell::of_text(whole(last)));
    parts.clear();
    return true;
  }

  bool on_number_part(std::string_view part, Error&) {
    parts += part;
    return true;
  }

  bool on_int64(std::int64_t value, std::string_view text, Error&) {
    number(whole(text), static_cast<double>(value), static_cast<std::uint64_t>(value), value >= 0);
    return true;
  }

  bool on_uint64(std::uint64_t value, std::string_view text, Error&) {
    number(whole(text), static_cast<double>(value), value, true);
    return true;
  }

  // The parser's number is off by some units in the last place: it is read again, exactly.
  bool on_double(double value, std::string_view last, Error&) {
    const std::string_view text = whole(last);
    double exact = value;
    std::from_chars(text.data(), text.data() + text.size(), exact);  // out of its range it stays as it is
    number(text, exact, 0, false);
    return true;
  }

  bool on_bool(bool value, Error&) {
    Cell cell;
    cell.kind = value ? Cell::Kind::kTrue : Cell::Kind::kFalse;
    scalar(cell);
    return true;
  }

  bool on_null(Error&) {
    scalar(Cell());
    return true;
  }

  bool on_comment_part(std::string_view, Error&) { return true; }
  bool on_comment(std::string_view, Error&) { return true; }
};

text::Cursor behind_blanks(text::Cursor p, text::Cursor end) noexcept {
  while (p != end && (text::is_blank(*p) || *p == '\n')) {
    ++p;
  }
  return p;
}

// Reads keys from the beginning of a list of them, up to one that is not followed by another or by the end of
// the list; returns where it has stopped. The text, up to `end`, does not end with a digit. The parser would
// execute twice as many instructions.
text::Cursor take_keys(text::Cursor begin, text::Cursor end, ExampleBuilder& into) {
  const auto begins_number = [end](text::Cursor p) {  // JSON has no 07
    return p != end && text::is_digit(*p) && (*p != '0' || !text::is_digit(p[1]));
  };
  std::array<std::uint64_t, 64> keys;
  std::size_t count = 0;
  text::Cursor taken = begin;
  const auto put = [&](std::uint64_t key, text::Cursor next) {
    keys[count] = key;
    taken = next;
    if (++count == keys.size()) {
      into.keys(keys);
      count = 0;
    }
  };
  // Keys of less than eight digits, with a comma and at most a space between them.
  const auto short_keys = [&](text::Cursor p) {
    while (end - p >= 16) {
      const std::uint64_t word = text::load8(p) ^ 0x3030303030303030U;
      const int digits = std::countr_zero(text::others_than_digits(word)) >> 3;
      if (digits == 0 || digits == 8 || p[digits] != ',' || (*p == '0' && digits > 1)) {
        break;
      }
      const text::Cursor next = p + digits + (p[digits + 1] == ' ' ? 2 : 1);
      if (!text::is_digit(*next)) {
        break;
      }
      put(text::number_of_digits(word, digits), next);
      p = next;
    }
    return p;
  };
  for (text::Cursor p = behind_blanks(begin, end); begins_number(p = short_keys(p));) {
    std::uint64_t key = 0;
    if (text::read_key(p, end, key) != text::Fault::kGood) {
      break;
    }
    p = behind_blanks(p, end);
    if (p == end || (*p != ',' && *p != ']')) {
      break;
    }
    if (*p == ',' && !begins_number(p = behind_blanks(p + 1, end))) {
      break;
    }
    put(key, p);
  }
  into.keys(std::span(keys).first(count));
  return taken;
}

// Where the keys of the next instance begin, if these follow the end of a list of keys with nothing between
// them; else null. The parser, which is within that list, is then within the next one: it need not be
// resumed for what lies between them.
text::Cursor next_keys(text::Cursor p, text::Cursor end) {
  static constexpr std::array<std::string_view, 7> kBetween{"]", "}", ",", "{", "\"keys\"", ":", "["};
  for (const std::string_view token : kBetween) {
    p = behind_blanks(p, end);
    if (static_cast<std::size_t>(end - p) < token.size() || std::memcmp(p, token.data(), token.size()) != 0) {
      return nullptr;
    }
    p += token.size();
  }
  return p;
}

// What is wrong at a byte of a body.
std::string malformed(std::string_view body, std::size_t at, const Error& error) {
  std::string what = "JSON is malformed (byte " + std::to_string(at) + "): " + error.message();
  for (const std::string_view constant : {"NaN", "nan", "Infinity", "Inf", "inf"}) {
    const std::string_view there = body.substr(std::min(at, body.size()));
    if (there.starts_with(constant) || there.starts_with("-" + std::string(constant))) {
      return what + ": JSON has no " + std::string(constant) + ", send null for a cell that is missing";
    }
  }
  return what;
}

}  // namespace

struct JsonInstances::Parser {
  json::basic_parser<Handler> parser{json::parse_options()};
};

JsonInstances::JsonInstances() : parser_(std::make_unique<Parser>()) {}
JsonInstances::~JsonInstances() = default;

void JsonInstances::read(std::string_view body, std::string_view allowed, ExampleBuilder& into) {
  json::basic_parser<Handler>& parser = parser_->parser;
  parser.reset();
  Handler& handler = parser.handler();
  handler.into = &into;
  handler.allowed = allowed;
  handler.place = Place::kStart;
  handler.skipped = 0;
  handler.found = false;
  handler.parts.clear();
  Error error;
  const std::span<const std::uint8_t> bytes = text::bytes_of(body);
  const bool ends_well = !body.empty() && !is_digit(body.back());
  std::size_t taken = 0;
  for (bool more = true; more && !error && !parser.done();) {
    const std::size_t open = ends_well ? body.find('[', taken) : std::string_view::npos;
    const std::size_t until = open == std::string_view::npos ? body.size() : open + 1;
    more = until != body.size();
    taken += parser.write_some(more, body.data() + taken, until - taken, error);
    if (more && !error && handler.in_keys()) {
      const text::Cursor end = bytes.data() + bytes.size();
      text::Cursor at = take_keys(bytes.data() + taken, end, into);
      for (text::Cursor next = next_keys(at, end); next != nullptr; next = next_keys(at, end)) {
        into.end_list();
        into.end();
        into.begin();
        into.column("keys");
        into.begin_list();
        at = take_keys(next, end, into);
      }
      taken = static_cast<std::size_t>(at - bytes.data());
    }
  }
  if (error) {
    if (error == json::error::too_deep) {
      throw BadBody("the body is nested too deeply: an instance is a flat object, or a line of text");
    }
    throw BadBody(malformed(body, taken, error));
  }
  if (const std::size_t behind = body.find_first_not_of(" \t\r\n", taken); behind != std::string_view::npos) {
    throw BadBody("the body is malformed (byte " + std::to_string(behind) +
                  "): there is more behind the object");
  }
  if (!handler.found) {
    throw BadBody(R"(no "instances": send {"instances": [...]})");
  }
}

}  // namespace shoal::predict
