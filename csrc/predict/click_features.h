// ClickFeatures: what a click model reads of an example, and the features of a request in that arrangement.
//
//   request    example 0:  site=a  ad=7  price:0.5  seen=3  seen=9           a key and a field for each feature
//              example 1:  site=b        price:2.0
//   arranged   keys        [[a, 7], [b, missing in ad]]                      fixed fields, in the order of the features
//              dense       [[0.5], [2.0]]
//              seen        keys [3, 9], offsets [0, 2, 2]                    lists and sequences
//
// The rules are those of training (python/shoal/models/arrangement.py).
//
// Invariants
//   I1  Every example has one key for each fixed field. More than one feature of a fixed field is an error.
//   I2  Columns beside the items of a list or sequence have as many items, in the same order.
//
// Threads: immutable; any number of callers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "predict/json.h"
#include "predict/model.h"

namespace shoal::predict {

struct ClickFeature {
  enum class Type : std::uint8_t { kCategory, kList, kSequence, kNumber, kBucket, kCross, kVector };

  std::string name;
  Type type = Type::kCategory;
  std::string column;
  std::string share;    // the feature whose rows it has, if they are not its own
  std::string weights;  // the column of its items' factors, if there is one
  std::vector<std::pair<std::string, std::string>>
      sides;  // columns of texts beside it, and whose rows they have
  std::vector<std::string> side_numeric;
  std::size_t max_len = 0;  // 0: all
  bool keeps_last = true;
  bool log = false;
  bool embed = false;
  std::vector<double> edges;
  std::vector<std::string> of;
  std::size_t size = 1;

  bool is_dense() const noexcept { return type == Type::kVector || (type == Type::kNumber && !embed); }
};

// The items of a list or sequence.
struct ClickItems {
  std::vector<std::int64_t> offsets;
  std::vector<std::uint64_t> keys;
  std::vector<float> weights;                               // one for each item
  std::map<std::string, std::vector<std::uint64_t>> sides;  // by column
  std::vector<float> numeric;                               // columns of side_numeric, for each item
};

struct ClickInputs {
  std::size_t examples = 0;
  std::vector<std::uint64_t> keys;  // of each example those of the fixed fields
  std::vector<float> values;        // of each key
  std::vector<float> dense;         // of each example
  std::map<std::string, ClickItems> items;
};

class ClickFeatures {
 public:
  // `described`: model.click.features of an export. std::invalid_argument: it is no description.
  explicit ClickFeatures(const json::object& described);

  // The format whose names of fields the columns are.
  const std::string& form() const noexcept { return form_; }
  std::size_t fixed() const noexcept { return fixed_.size(); }
  std::size_t dense_width() const noexcept { return dense_width_; }
  // Place of a fixed field. std::invalid_argument: it is none.
  std::size_t index_of(std::string_view name) const;
  // The list or sequence of a name. std::invalid_argument: it is none.
  const ClickFeature& jagged(std::string_view name) const;

  // Throws BadExample.
  ClickInputs arrange(const Features& features) const;
  // The items that crosses of lists make of the features, and those that they make on the way.
  std::uint64_t crossed_items(const Features& features) const;
  // Memory that arrange() takes for an example, a feature and a crossed item, at most.
  std::uint64_t example_bytes() const noexcept;
  std::uint64_t feature_bytes() const noexcept;
  static constexpr std::uint64_t kCrossedBytes = 48;

 private:
  friend class Arranging;

  const ClickFeature& named(std::string_view name) const;
  bool is_jagged(const ClickFeature& one) const;
  std::string hashed_as(const std::string& name) const;
  std::uint64_t number_of(std::string_view column) const;
  std::uint64_t missing_in(const std::string& column) const;
  // Of the field with this number; features.size() if there is none.
  std::size_t place_of(std::uint64_t field) const noexcept;

  std::string form_;
  std::vector<ClickFeature> all_;
  std::vector<const ClickFeature*> fixed_;
  std::vector<const ClickFeature*> dense_;
  std::vector<const ClickFeature*> jagged_;
  std::size_t dense_width_ = 0;
  std::vector<std::uint64_t> missing_;                              // of each fixed field
  std::map<std::string, std::uint64_t, std::less<>> side_missing_;  // by whose rows they are
  std::map<std::string, std::vector<std::uint64_t>> buckets_;       // keys of intervals, by feature
  std::map<std::string, std::size_t, std::less<>> places_;          // of columns
  std::vector<std::pair<std::uint64_t, std::size_t>> fields_;       // their numbers, ascending, and places
};

}  // namespace shoal::predict
