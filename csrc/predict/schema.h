// InputSchema: what the inputs of a model are, by the format and the schema of its training data.
//
//   form of an example   taken by models of
//   keys                 every format
//   named columns        csv, Parquet, Arrow; Criteo
//   lines of text        libsvm, libffm, vw, Criteo; rows of csv for models of csv, Parquet, Arrow
//
// Threads: immutable; any number of readers.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "predict/json.h"
#include "text/cell.h"

namespace shoal::predict {

// Texts of cells that hold nothing, as pandas reads csv.
inline constexpr std::string_view kMissingTexts[] = {
    "",     "#N/A", "#N/A N/A", "#NA",  "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A",  "NA",       "NULL", "NaN",     "None",     "n/a",  "nan",  "null"};
// The text whose key stands for an item of a list that holds nothing.
inline constexpr unsigned kIntegerColumns = 13;  // of Criteo's logs
inline constexpr std::string_view kMissingItem{"\0missing", 8};

enum class DataFormat : std::uint8_t { kNone, kLibsvm, kLibffm, kVw, kCriteo, kCsv, kParquet, kArrow };

enum class Role : std::uint8_t { kPassedOver, kLabel, kNumeric, kCategorical, kList, kVector };

struct Column {
  Role role = Role::kPassedOver;
  std::uint64_t field = 0;
  std::uint64_t seed =
      0;  // of the field in which its texts are hashed: its own, or that of a list that it shares
  std::size_t index = 0;  // of the known columns: their number; of others: 0
};

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};

using ColumnMap = std::unordered_map<std::string, Column, TextHash, std::equal_to<>>;

struct InputSchema {
  DataFormat format = DataFormat::kNone;
  std::string format_name;  // empty: batches of a program
  // The format whose fields the model needs with each key; empty: it needs none.
  std::string fields_of;
  bool has_columns = false;  // named ones, of csv, Parquet or Arrow
  ColumnMap columns;         // that are named
  Role others = Role::kPassedOver;
  bool has_values = false;         // of columns: whether some are numbers
  text::MissingTexts missing;      // of cells in JSON, and of items
  text::MissingTexts csv_missing;  // of cells in rows of csv
  std::vector<double> missing_numbers;
  std::optional<std::vector<std::string>> header;  // of files without one
  std::string label;                               // the name of its column; empty: there is none
  char separator = ',';
  char list_separator = '|';
  std::vector<std::uint64_t> pairs;  // fields that interact, by twos

  bool is_criteo() const noexcept { return format == DataFormat::kCriteo; }
  bool needs_fields() const noexcept { return !fields_of.empty(); }
  bool takes_lines() const noexcept {
    return has_columns || (format != DataFormat::kNone && format != DataFormat::kParquet);
  }
  // Whether a cell of the column is a list.
  bool is_listed(std::string_view name) const noexcept {
    const auto found = columns.find(name);
    return found != columns.end() &&
           (found->second.role == Role::kList || found->second.role == Role::kVector);
  }
  bool is_missing(std::string_view text) const noexcept {
    return missing.contains(reinterpret_cast<text::Cursor>(text.data()), text.size());
  }
  bool is_missing(double number) const noexcept;
  // The names of the columns that are features, in the order of the description.
  std::vector<std::string> features() const;
  // The same, for messages.
  std::string names() const;
  // What the model takes, for messages.
  std::string takes() const;
};

// `model`: the description in an export. `fields_of`: as above.
InputSchema read_schema(const json::object& model, std::string fields_of);

// The number of a field as data of a format name it. std::invalid_argument: there is none of that name.
std::uint64_t field_number(std::string_view format, std::string_view name);
// The key of a text in the field with this number, as readers make it.
std::uint64_t text_key(std::string_view text, std::uint64_t field) noexcept;
// 1 to 39, from that number or from I1 to I13, C1 to C26; 0 if it is none.
unsigned criteo_column(std::string_view name) noexcept;

}  // namespace shoal::predict
