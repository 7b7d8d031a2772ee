// CSV and TSV with named columns. A cell may be in double quotes, in which a quote is written twice; a row is
// one line.
//
// target.h states what a parse does. weights are needed if a column is the weight, values if one is numeric
// or a vector. A line needs room for as many features as it has columns.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "text/cell.h"
#include "text/target.h"

namespace shoal::text {

enum class CellKind : std::uint8_t { kPassedOver, kLabel, kWeight, kNumeric, kCategorical, kList, kVector };

struct CsvColumn {
  CellKind kind = CellKind::kPassedOver;
  std::uint64_t field = 0;  // of its features
  std::uint64_t seed = 0;   // field_seed of the field in which its texts are hashed
};

struct CsvColumns {
  std::vector<CsvColumn> all;
  std::vector<CsvColumn> unlabelled;  // the columns of lines without a label, if there is no header; or none
  std::uint8_t separator = ',';
  std::uint8_t list_separator = '|';  // between the items of a list or a vector
  MissingTexts missing;               // cells without a value
  std::optional<std::string>
      positive;  // the text of the label that counts as 1; without it labels are numbers
};

// `scratch` has room for the longest line: a cell with quotes in it is copied there.
Stop parse_csv(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip,
               const CsvColumns& columns, std::span<std::uint8_t> scratch) noexcept;

}  // namespace shoal::text
