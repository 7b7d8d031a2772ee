// ExampleBuilder: the examples of a request, from keys, named columns and lines, one after the other.
//
//   begin()  an example by keys or columns:  column(name), then cell() once, or begin_list() cell()* end_list();
//            ...                             until end()
//   line()   an example of a line of text
//   finish() adds the interactions
//
// An example's features depend on it alone, and are those that the reader of the training data gives.
//
// Invariants
//   I1  After end() or line() an example is whole; one that has failed leaves the builder useless until reset().
//   I2  Its arrays take `limit` bytes at most.
//
// Threads: working memory of one caller at a time; it keeps its memory from request to request.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernel/interactions.h"
#include "predict/model.h"
#include "predict/schema.h"
#include "text/csv.h"

namespace shoal::predict {

// An example that cannot be used: the message says where and why.
class BadExample : public std::runtime_error {
 public:
  BadExample(std::int64_t example, const std::string& what) : std::runtime_error(what), example_(example) {}
  std::int64_t example() const noexcept { return example_; }  // -1: none in particular

 private:
  std::int64_t example_;
};

// Examples that take more memory than they may.
class TooLarge : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Cell {
  enum class Kind : std::uint8_t { kNull, kFalse, kTrue, kWhole, kReal, kText, kObject };

  Kind kind = Kind::kNull;
  std::string_view text;    // of a text; of a whole number its digits
  double number = 0.0;      // of a number
  std::uint64_t whole = 0;  // of a whole number
  bool fits = false;        // whether `whole` is the number: it is 0 to 2^64 - 1

  static Cell of_text(std::string_view text) noexcept {
    Cell cell;
    cell.kind = Kind::kText;
    cell.text = text;
    return cell;
  }
  static Cell of_number(double number) noexcept {
    Cell cell;
    cell.kind = Kind::kReal;
    cell.number = number;
    return cell;
  }
};

class ExampleBuilder {
 public:
  // Begins a request: `limit` in bytes.
  void reset(const InputSchema& schema, std::size_t limit);

  void begin();
  void column(std::string_view name);
  void cell(const Cell& cell);
  void begin_list();
  void end_list();
  void end();

  // Whether the current list is that of keys, which keys() adds to: as cell() of whole numbers, but faster.
  bool in_keys() const noexcept { return in_list_ && member_ == Member::kKeys; }
  void keys(std::span<const std::uint64_t> keys);

  void line(std::string_view text);
  // Lines or rows of csv, as a file has them.
  void text(std::string_view text);

  // The features of all examples, with the interactions; of a model that needs them, with fields.
  Features finish();
  std::size_t examples() const noexcept { return offsets_.empty() ? 0 : offsets_.size() - 1; }
  // Whether the features have values; without, each is 1.
  bool is_valued() const noexcept { return is_valued_; }
  // Of the arrays of features.
  std::size_t bytes() const noexcept {
    return keys_.capacity() * sizeof(std::uint64_t) + crossed_keys_.capacity() * sizeof(std::uint64_t) +
           line_.capacity();
  }
  // Names of columns that the model does not know.
  const std::set<std::string, std::less<>>& unknown() const noexcept { return unknown_; }

  // Adds to the message of an error where it is.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  // What the current member of an example is.
  enum class Member : std::uint8_t { kColumn, kKeys, kValues, kFields };

  static constexpr std::size_t kCriteoCells = 40;

  [[noreturn]] void refuse_size() const;
  [[noreturn]] void refuse_cell(const std::string& what) const;
  void put(std::uint64_t key, float value, std::uint64_t field);
  void put_column(const Cell& cell);
  void put_item(const Cell& cell);
  void put_text(std::string_view text);
  float number_of(const Cell& cell) const;
  void put_sparse(const Cell& cell);
  void put_criteo(const Cell& cell);
  void end_sparse();
  void end_criteo();
  void find_column();
  void parse_text(std::string_view text, const text::CsvColumns* columns);
  [[noreturn]] void refuse_line(std::string_view line, std::size_t at, text::Fault fault);
  std::string excerpt_of(const Cell& cell) const;

  const InputSchema* schema_ = nullptr;
  std::size_t most_keys_ = 0;
  std::size_t most_examples_ = 0;
  std::size_t limit_ = 0;
  bool takes_fields_ = false;
  std::vector<std::int64_t> offsets_;
  std::vector<std::uint64_t> keys_;
  bool is_valued_ = false;     // whether a value is not 1
  std::vector<float> values_;  // as many as keys if is_valued_, or none
  std::vector<std::uint64_t> fields_;
  std::set<std::string, std::less<>> unknown_;

  // The current example.
  bool has_keys_ = false;
  std::size_t lists_ = 0;    // of keys, values and fields
  std::size_t columns_ = 0;  // other members
  std::string a_column_;     // one of their names, if there are keys
  std::vector<float> sparse_values_;
  std::vector<std::uint64_t> sparse_fields_;
  bool has_values_ = false;
  bool has_fields_ = false;

  // The current member.
  Member member_ = Member::kColumn;
  std::string name_;
  Column column_;
  bool in_list_ = false;
  std::vector<std::size_t> seen_;  // by the index of a column: the last example that had it, and one more
  std::set<std::string, std::less<>> seen_others_;  // of the current example

  // The current example of Criteo's columns: the places of its cells in text_.
  std::array<std::pair<std::size_t, std::size_t>, kCriteoCells> cells_{};
  std::uint64_t cells_seen_ = 0;
  std::string text_;
  std::string line_;

  // For the parsers of lines.
  std::vector<float> labels_;
  std::vector<float> weights_;
  std::vector<std::int64_t> ends_;
  std::vector<std::uint8_t> unquoted_;

  std::vector<std::int64_t> crossed_offsets_;
  std::vector<std::uint64_t> crossed_keys_;
  std::vector<float> crossed_values_;
};

}  // namespace shoal::predict
