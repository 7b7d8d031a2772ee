#include "predict/schema.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <span>
#include <utility>

#include "base/check.h"
#include "text/token_key.h"

namespace shoal::predict {

namespace {

constexpr unsigned kCriteoColumns = 39;

constexpr std::array<std::pair<std::string_view, DataFormat>, 7> kFormats = {{
    {"libsvm", DataFormat::kLibsvm},
    {"libffm", DataFormat::kLibffm},
    {"vw", DataFormat::kVw},
    {"criteo", DataFormat::kCriteo},
    {"csv", DataFormat::kCsv},
    {"parquet", DataFormat::kParquet},
    {"arrow", DataFormat::kArrow},
}};

DataFormat format_of(std::string_view name) {
  const auto found =
      std::find_if(kFormats.begin(), kFormats.end(), [&](const auto& one) { return one.first == name; });
  SHOAL_CHECK(found != kFormats.end(),
              "the model learned from '" + std::string(name) + "', which is not known");
  return found->second;
}

bool is_named(DataFormat format) noexcept {
  return format == DataFormat::kCsv || format == DataFormat::kParquet || format == DataFormat::kArrow;
}

char separator_in(const json::object& of, std::string_view name, char otherwise) {
  const std::string text = optional_text_in(of, name);
  SHOAL_CHECK(text.size() <= 1, in_quotes(name) + " is not one character");
  return text.empty() ? otherwise : text.front();
}

std::uint64_t key_of(std::string_view text, std::uint64_t seed) noexcept {
  const auto* const p = reinterpret_cast<const std::uint8_t*>(text.data());
  return text::token_key(seed, p, text.size(), p + text.size());
}

// A digit string without a sign, as a number; false if it is none.
bool read_whole(std::string_view text, std::uint64_t& number) noexcept {
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
  return !text.empty() && fault == std::errc{} && end == text.data() + text.size();
}

void read_columns(const json::object& schema, InputSchema& into) {
  const json::value* const categorical = optional_in(schema, "categorical");
  into.others = categorical == nullptr ? Role::kCategorical : Role::kPassedOver;
  const auto add = [&](const std::string& name, Role role, const std::string& shared) {
    const std::uint64_t field = field_number("csv", name);
    const std::uint64_t hashed = shared == name ? field : field_number("csv", shared);
    Column& column = into.columns[name];
    column = {.role = role,
              .field = field,
              .seed = text::field_seed(hashed),
              .index = column.index == 0 ? into.columns.size() : column.index};
    into.has_values = into.has_values || role == Role::kNumeric || role == Role::kVector;
  };
  const auto add_all = [&](std::string_view member, Role role) {
    for (const std::string& name : texts_in(schema, member)) {
      add(name, role, name);
    }
  };
  add_all("categorical", Role::kCategorical);
  add_all("numeric", Role::kNumeric);
  if (const json::value* const lists = optional_in(schema, "lists"); lists != nullptr) {
    SHOAL_CHECK(lists->is_object(), "'lists' is not an object");
    for (const auto& [name, shared] : lists->get_object()) {
      add(std::string(name), Role::kList, text_of(shared, "lists"));
    }
  }
  add_all("vectors", Role::kVector);
  add_all("labels", Role::kPassedOver);
  if (const std::string weight = optional_text_in(schema, "weight"); !weight.empty()) {
    add(weight, Role::kPassedOver, weight);
  }
  into.label = optional_text_in(schema, "label");
  if (!into.label.empty()) {
    add(into.label, Role::kLabel, into.label);
  }
  if (optional_in(schema, "columns") != nullptr) {
    into.header = texts_in(schema, "columns");
  }
  into.separator = separator_in(schema, "sep", ',');
  into.list_separator = separator_in(schema, "list_separator", '|');
}

// The numbers whose texts hold nothing.
std::vector<double> numbers_of(const std::vector<std::string>& texts) {
  std::vector<double> found;
  for (std::string_view text : texts) {
    if (text.starts_with('+')) {
      text.remove_prefix(1);
    }
    double number = 0.0;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (!text.empty() && fault == std::errc{} && end == text.data() + text.size()) {
      found.push_back(number);
    }
  }
  return found;
}

}  // namespace

std::uint64_t text_key(std::string_view text, std::uint64_t field) noexcept {
  return key_of(text, text::field_seed(field));
}

unsigned criteo_column(std::string_view name) noexcept {
  const char first = name.empty() ? '\0' : name.front();
  const bool is_integer = first == 'I' || first == 'i';
  const bool is_category = first == 'C' || first == 'c';
  const unsigned before = is_category ? kIntegerColumns : 0;
  std::uint64_t number = 0;
  if (!read_whole(is_integer || is_category ? name.substr(1) : name, number)) {
    return 0;
  }
  number += before;
  return number > before && number <= (is_integer ? kIntegerColumns : kCriteoColumns)
             ? static_cast<unsigned>(number)
             : 0;
}

std::uint64_t field_number(std::string_view format, std::string_view name) {
  if (format == "criteo") {
    const unsigned column = criteo_column(name);
    SHOAL_CHECK(column > 0, "it is not a feature column: send 1 to 39, or I1 to I13 and C1 to C26");
    return column;
  }
  if (format == "libffm") {
    std::uint64_t number = 0;
    SHOAL_CHECK(read_whole(name, number), "fields of libffm are numbers: send 0, 1, ...");
    return number;
  }
  return key_of(name, text::field_seed(0));
}

bool InputSchema::is_missing(double number) const noexcept {
  return std::find(missing_numbers.begin(), missing_numbers.end(), number) != missing_numbers.end();
}

std::vector<std::string> InputSchema::features() const {
  std::vector<std::string> found(columns.size());
  for (const auto& [name, column] : columns) {
    if (column.role != Role::kPassedOver && column.role != Role::kLabel) {
      found[column.index - 1] = name;
    }
  }
  std::erase(found, std::string());
  return found;
}

std::string InputSchema::names() const {
  constexpr std::size_t kMost = 40;
  const std::vector<std::string> found = features();
  std::string all;
  for (const std::string& name : std::span(found).first(std::min(found.size(), kMost))) {
    all.append(all.empty() ? "" : ", ").append(in_quotes(name));
  }
  return found.size() <= kMost ? all : all + " and " + std::to_string(found.size() - kMost) + " more";
}

std::string InputSchema::takes() const {
  std::string all("this model learned from ");
  all.append(format_name.empty() ? std::string_view("batches") : format_name).append(": send ");
  if (has_columns) {
    all.append(R"(columns by name ({"column": cell, ...}) or )");
  }
  if (is_criteo()) {
    all.append(R"(columns by name or number ({"I1": 5, "C1": "68fd1e64", ...}) or )");
  }
  if (format != DataFormat::kNone && !has_columns) {
    all.append("lines of ").append(format_name).append(" text (strings) or ");
  }
  return all.append(R"(keys ({"keys": [...])").append(needs_fields() ? R"(, "fields": [...]})" : "})");
}

InputSchema read_schema(const json::object& model, std::string fields_of) {
  InputSchema found;
  found.fields_of = std::move(fields_of);
  found.format_name = optional_text_in(model, "format");
  const json::value* const given = optional_in(model, "schema");
  SHOAL_CHECK(given == nullptr || given->is_object(), "'schema' is not an object");
  const json::object none;
  const json::object& schema = given == nullptr ? none : given->get_object();
  if (!found.format_name.empty()) {
    found.format = format_of(found.format_name);
  }
  found.has_columns = is_named(found.format);
  if (found.has_columns) {
    read_columns(schema, found);
  }
  std::vector<std::string> missing = texts_in(schema, "na_values");
  std::vector<std::string> in_csv = missing;
  if (flag_in(schema, "keep_default_na", true)) {
    in_csv.insert(in_csv.end(), std::begin(kMissingTexts), std::end(kMissingTexts));
  }
  found.csv_missing = text::MissingTexts(in_csv);
  if (found.format == DataFormat::kCsv) {
    missing = std::move(in_csv);
  }
  found.missing = text::MissingTexts(missing);
  found.missing_numbers = numbers_of(missing);
  if (const json::value* const pairs = optional_in(schema, "interactions"); pairs != nullptr) {
    SHOAL_CHECK(pairs->is_array(), "'interactions' is not a list");
    const std::string& form = found.fields_of.empty() ? found.format_name : found.fields_of;
    for (const json::value& pair : pairs->get_array()) {
      SHOAL_CHECK(pair.is_array() && pair.get_array().size() == 2, "an interaction is not of two fields");
      for (const json::value& name : pair.get_array()) {
        found.pairs.push_back(field_number(form, name.is_string()
                                                     ? text_of(name, "interactions")
                                                     : std::to_string(count_of(name, "interactions"))));
      }
    }
  }
  return found;
}

}  // namespace shoal::predict
