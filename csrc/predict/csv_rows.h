// Rows of csv in a request: the header, and the columns of the model in it (shoal.data.columns has the same rules).
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "predict/schema.h"
#include "text/csv.h"

namespace shoal::predict {

inline constexpr std::string_view kCrAlone =
    "a carriage return (CR) stands within the first line: if lines end with it alone, write newlines, as "
    "tr '\\r' '\\n' does";

// A malformed row, and the byte at fault.
class BadLine : public std::runtime_error {
 public:
  BadLine(std::string line, std::size_t at, const std::string& what)
      : std::runtime_error(what), line_(std::move(line)), at_(at) {}
  const std::string& line() const noexcept { return line_; }
  std::size_t at() const noexcept { return at_; }

 private:
  std::string line_;
  std::size_t at_;
};

// The names of the columns in the first line of a file. std::invalid_argument: it is none.
std::vector<std::string> split_header(std::string_view line, char separator);

// std::invalid_argument: a column of the model is missing, or there more than once.
text::CsvColumns bind_columns(const InputSchema& schema, const std::vector<std::string>& names);

// The name of the column of the cell at a byte of a row; empty if the row has another number of cells.
std::string column_at(const InputSchema& schema, const std::vector<std::string>& names, std::string_view line,
                      std::size_t at);

}  // namespace shoal::predict
