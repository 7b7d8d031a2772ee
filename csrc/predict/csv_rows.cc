#include "predict/csv_rows.h"

#include <algorithm>

#include "base/check.h"
#include "text/token_key.h"

namespace shoal::predict {

namespace {

constexpr std::size_t kMostColumns = 10'000;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// The cells of a row; false if a quote is not closed.
bool split(std::string_view line, char separator, std::vector<std::string>& cells) {
  std::size_t at = 0;
  for (;;) {
    std::string& cell = cells.emplace_back();
    if (at < line.size() && line[at] == '"') {
      for (++at;; ++at) {
        if (at >= line.size()) {
          return false;
        }
        if (line[at] != '"') {
          cell += line[at];
        } else if (at + 1 < line.size() && line[at + 1] == '"') {
          cell += line[++at];
        } else {
          break;
        }
      }
      ++at;
      if (at < line.size() && line[at] != separator) {
        return false;
      }
    } else {
      const std::size_t end = std::min(line.find(separator, at), line.size());
      cell.assign(line.substr(at, end - at));
      at = end;
    }
    if (at >= line.size()) {
      return true;
    }
    ++at;
  }
}

text::CellKind kind_of(Role role) noexcept {
  switch (role) {
    case Role::kNumeric:
      return text::CellKind::kNumeric;
    case Role::kCategorical:
      return text::CellKind::kCategorical;
    case Role::kList:
      return text::CellKind::kList;
    case Role::kVector:
      return text::CellKind::kVector;
    case Role::kPassedOver:
    case Role::kLabel:
      break;
  }
  return text::CellKind::kPassedOver;
}

text::CsvColumn bind_column(const InputSchema& schema, const std::string& name) {
  if (const auto found = schema.columns.find(name); found != schema.columns.end()) {
    return {.kind = kind_of(found->second.role), .field = found->second.field, .seed = found->second.seed};
  }
  const std::uint64_t field = field_number("csv", name);
  return {.kind = kind_of(schema.others), .field = field, .seed = text::field_seed(field)};
}

}  // namespace

std::vector<std::string> split_header(std::string_view line, char separator) {
  if (line.starts_with(kByteOrderMark)) {
    line.remove_prefix(kByteOrderMark.size());
  }
  while (line.ends_with('\r')) {
    line.remove_suffix(1);
  }
  SHOAL_CHECK(
      line.find('\r') == std::string_view::npos,
      "a carriage return (CR) stands within the first line: if lines end with it alone, write newlines");
  const auto columns = static_cast<std::size_t>(std::count(line.begin(), line.end(), separator)) + 1;
  SHOAL_CHECK(columns <= kMostColumns, std::to_string(columns) + " columns: at most " +
                                           std::to_string(kMostColumns) + " are accepted");
  std::vector<std::string> names;
  SHOAL_CHECK(line.empty() || split(line, separator, names),
              "the header is not a row of column names: is this CSV?");
  constexpr std::string_view kSeparators = ",;\t|";
  for (const char other : kSeparators) {
    SHOAL_CHECK(names.size() != 1 || other == separator || line.find(other) == std::string_view::npos,
                "the header has no '" + std::string(1, separator) + "', and some '" + std::string(1, other) +
                    "': send cells as the training data separates them");
  }
  return names;
}

text::CsvColumns bind_columns(const InputSchema& schema, const std::vector<std::string>& names) {
  text::CsvColumns bound{.all = {},
                         .unlabelled = {},
                         .separator = static_cast<std::uint8_t>(schema.separator),
                         .list_separator = static_cast<std::uint8_t>(schema.list_separator),
                         .missing = schema.csv_missing,
                         .positive = {}};
  const auto check_once = [&](const std::string& name) {
    const auto count = std::count(names.begin(), names.end(), name);
    if (count != 1) {
      std::string all;
      for (const std::string& one : names) {
        all.append(all.empty() ? "" : ", ").append(in_quotes(one));
      }
      throw std::invalid_argument("column '" + name + "' is " +
                                  (count == 0 ? "not there" : "there " + std::to_string(count) + " times") +
                                  ": the columns are " + all);
    }
  };
  for (const std::string& name : schema.features()) {
    check_once(name);
  }
  for (const std::string& name : names) {
    bound.all.push_back(bind_column(schema, name));
    if (bound.all.back().kind != text::CellKind::kPassedOver) {
      check_once(name);
    }
    if (schema.header && name != schema.label) {
      bound.unlabelled.push_back(bound.all.back());
    }
  }
  if (bound.unlabelled.size() == bound.all.size()) {
    bound.unlabelled.clear();
  }
  return bound;
}

std::string column_at(const InputSchema& schema, const std::vector<std::string>& names, std::string_view line,
                      std::size_t at) {
  std::vector<std::string> cells;
  std::vector<std::string> before;
  while (line.ends_with('\r')) {
    line.remove_suffix(1);
  }
  if (!split(line, schema.separator, cells)) {
    return {};
  }
  split(line.substr(0, at), schema.separator, before);
  std::vector<std::string> those = names;
  if (cells.size() + 1 == names.size()) {
    std::erase(those, schema.label);
  }
  return cells.size() == those.size() && before.size() <= those.size() ? those[before.size() - 1]
                                                                       : std::string();
}

}  // namespace shoal::predict
