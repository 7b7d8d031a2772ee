#include "predict/click_features.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "base/check.h"
#include "kernel/interactions.h"
#include "predict/example_builder.h"
#include "predict/schema.h"

namespace shoal::predict {

namespace {

using FeatureType = ClickFeature::Type;

constexpr std::array<std::pair<std::string_view, FeatureType>, 7> kFeatureTypes{
    {{"category", FeatureType::kCategory},
     {"list", FeatureType::kList},
     {"sequence", FeatureType::kSequence},
     {"number", FeatureType::kNumber},
     {"bucket", FeatureType::kBucket},
     {"cross", FeatureType::kCross},
     {"vector", FeatureType::kVector}}};

constexpr std::size_t kMaxVector = std::size_t{1} << 20U;

std::size_t size_in(const json::object& of, std::string_view name, std::size_t otherwise) {
  const json::value* const found = optional_in(of, name);
  return found == nullptr ? otherwise : static_cast<std::size_t>(count_of(*found, name));
}

ClickFeature read_feature(const json::object& given) {
  ClickFeature found;
  found.name = text_in(given, "name");
  if (const std::string type = optional_text_in(given, "type"); !type.empty()) {
    const auto* const known = std::find_if(kFeatureTypes.begin(), kFeatureTypes.end(),
                                           [&](const auto& one) { return one.first == type; });
    SHOAL_CHECK(known != kFeatureTypes.end(), "feature " + in_quotes(found.name) + " is of type " +
                                                  in_quotes(type) + ", which this version does not know");
    found.type = known->second;
  }
  found.column = optional_text_in(given, "column");
  if (found.column.empty()) {
    found.column = found.name;
  }
  found.share = optional_text_in(given, "share");
  found.weights = optional_text_in(given, "weights");
  if (const json::value* const side = optional_in(given, "side"); side != nullptr && side->is_object()) {
    for (const auto& [column, share] : side->get_object()) {
      found.sides.emplace_back(std::string(column), text_of(share, "side"));
    }
  } else {
    for (std::string& column : texts_in(given, "side")) {
      found.sides.emplace_back(column, column);
    }
  }
  found.side_numeric = texts_in(given, "side_numeric");
  found.max_len = size_in(given, "max_len", 0);
  found.keeps_last = optional_text_in(given, "keep") != "first";
  found.log = flag_in(given, "log", false);
  found.embed = flag_in(given, "embed", false);
  found.edges = optional_in(given, "edges") == nullptr ? std::vector<double>() : numbers_in(given, "edges");
  found.of = texts_in(given, "of");
  found.size = std::max<std::size_t>(size_in(given, "size", 1), 1);
  SHOAL_CHECK(found.size <= kMaxVector,
              "vector " + in_quotes(found.name) + " has " + std::to_string(found.size) + " numbers");
  return found;
}

std::string joined(const std::vector<std::string>& names) {
  std::string found;
  for (const std::string& name : names) {
    found.append(found.empty() ? "" : "/").append(name);
  }
  return found;
}

// Keys of examples, jagged.
struct Jagged {
  std::vector<std::int64_t> offsets;
  std::vector<std::uint64_t> keys;

  std::span<const std::uint64_t> of(std::size_t i) const noexcept {
    return {keys.data() + offsets[i], keys.data() + offsets[i + 1]};
  }
};

Jagged pairs_of(const Jagged& first, const Jagged& second) {
  Jagged found{.offsets = {0}, .keys = {}};
  for (std::size_t i = 0; i + 1 < first.offsets.size(); ++i) {
    for (const std::uint64_t one : first.of(i)) {
      for (const std::uint64_t other : second.of(i)) {
        found.keys.push_back(interaction_key(one, other));
      }
    }
    found.offsets.push_back(static_cast<std::int64_t>(found.keys.size()));
  }
  return found;
}

}  // namespace

ClickFeatures::ClickFeatures(const json::object& described) : form_(text_in(described, "form")) {
  for (const json::value& one : array_in(described, "features")) {
    SHOAL_CHECK(one.is_object(), "a feature is not an object");
    all_.push_back(read_feature(one.get_object()));
  }
  const auto add_place = [this](const std::string& column) {
    if (places_.try_emplace(column, places_.size()).second) {
      fields_.emplace_back(number_of(column), places_.size() - 1);
    }
  };
  for (const ClickFeature& one : all_) {
    SHOAL_CHECK(one.type != FeatureType::kCross || one.of.size() >= 2,
                in_quotes(one.name) + " is a cross of fewer than two features");
    for (const std::string& name : one.of) {
      SHOAL_CHECK(
          !named(name).is_dense() && named(name).type != FeatureType::kCross,
          in_quotes(one.name) + " is a cross of " + in_quotes(name) + ", which has no keys of its own");
    }
    const bool listed = is_jagged(one);
    (one.is_dense() ? dense_ : (listed ? jagged_ : fixed_)).push_back(&one);
    dense_width_ += one.is_dense() ? one.size : 0;
    if (!listed && !one.is_dense()) {
      missing_.push_back(one.type == FeatureType::kCross
                             ? text_key(kMissingItem, text_key(joined(one.of), 0))
                             : missing_in(one.share.empty() ? one.column : hashed_as(one.share)));
    }
    if (one.type == FeatureType::kBucket) {
      SHOAL_CHECK(!one.edges.empty() && std::is_sorted(one.edges.begin(), one.edges.end()),
                  "the edges of bucket " + in_quotes(one.name) + " are missing, or do not ascend");
      for (std::size_t i = 0; i <= one.edges.size(); ++i) {
        buckets_[one.name].push_back(text_key(std::to_string(i), number_of(one.column)));
      }
    }
    for (const auto& [column, share] : one.sides) {
      side_missing_.try_emplace(share, missing_in(hashed_as(share)));
    }
    if (one.type == FeatureType::kCross) {
      continue;
    }
    add_place(one.column);
    if (!one.weights.empty()) {
      add_place(one.weights);
    }
    for (const auto& [column, share] : one.sides) {
      add_place(column);
    }
    for (const std::string& column : one.side_numeric) {
      add_place(column);
    }
  }
  std::sort(fields_.begin(), fields_.end());
}

const ClickFeature& ClickFeatures::named(std::string_view name) const {
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const auto& one) { return one.name == name; });
  SHOAL_CHECK(found != all_.end(), in_quotes(name) + " is none of the features");
  return *found;
}

bool ClickFeatures::is_jagged(const ClickFeature& one) const {
  if (one.type != FeatureType::kCross) {
    return one.type == FeatureType::kList || one.type == FeatureType::kSequence;
  }
  return std::any_of(one.of.begin(), one.of.end(),
                     [&](const std::string& name) { return is_jagged(named(name)); });
}

std::string ClickFeatures::hashed_as(const std::string& name) const {
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const auto& one) { return one.name == name; });
  return found == all_.end() ? name : found->column;
}

std::uint64_t ClickFeatures::number_of(std::string_view column) const { return field_number(form_, column); }

std::uint64_t ClickFeatures::missing_in(const std::string& column) const {
  return text_key(kMissingItem, number_of(column));
}

std::size_t ClickFeatures::place_of(std::uint64_t field) const noexcept {
  const auto at = std::lower_bound(fields_.begin(), fields_.end(), std::pair(field, std::size_t{0}));
  return at != fields_.end() && at->first == field ? at->second : fields_.size();
}

std::size_t ClickFeatures::index_of(std::string_view name) const {
  const auto found =
      std::find_if(fixed_.begin(), fixed_.end(), [&](const auto* one) { return one->name == name; });
  SHOAL_CHECK(found != fixed_.end(), in_quotes(name) + " is none of the features with one key");
  return static_cast<std::size_t>(found - fixed_.begin());
}

const ClickFeature& ClickFeatures::jagged(std::string_view name) const {
  const auto found =
      std::find_if(jagged_.begin(), jagged_.end(), [&](const auto* one) { return one->name == name; });
  SHOAL_CHECK(found != jagged_.end(), in_quotes(name) + " is no list or sequence");
  return **found;
}

// The features of a request, by column.
class Arranging {
 public:
  Arranging(const ClickFeatures& of, const Features& features)
      : of_(of), features_(features), examples_(features.examples()) {
    SHOAL_CHECK(features.fields.size() == features.keys.size(), "there is one field for each key");
    const std::size_t columns = of.fields_.size();
    std::vector<std::size_t> places(features.keys.size());
    ends_.assign(columns + 2, 0);
    for (std::size_t e = 0; e < places.size(); ++e) {
      places[e] = of.place_of(features.fields[e]);
      ++ends_[places[e] + 1];
    }
    for (std::size_t c = 0; c <= columns; ++c) {
      ends_[c + 1] += ends_[c];
    }
    order_.resize(places.size());
    example_.resize(places.size());
    std::vector<std::size_t> next(ends_.begin(), ends_.end() - 1);
    for (std::size_t i = 0; i < examples_; ++i) {
      for (auto e = static_cast<std::size_t>(features.offsets[i]);
           e < static_cast<std::size_t>(features.offsets[i + 1]); ++e) {
        const std::size_t to = next[places[e]]++;
        order_[to] = e;
        example_[to] = i;
      }
    }
  }

  ClickInputs arrange() {
    ClickInputs found;
    found.examples = examples_;
    const std::size_t fixed = of_.fixed();
    found.keys.reserve(examples_ * fixed);
    for (std::size_t i = 0; i < examples_; ++i) {
      found.keys.insert(found.keys.end(), of_.missing_.begin(), of_.missing_.end());
    }
    found.values.assign(found.keys.size(), 1.0F);
    for (std::size_t j = 0; j < fixed; ++j) {
      put_fixed(*of_.fixed_[j], j, found);
    }
    put_dense(found);
    for (const ClickFeature* one : of_.jagged_) {
      found.items.emplace(one->name, items(*one));
    }
    return found;
  }

  std::uint64_t crossed_items() const {
    constexpr double kMost = 1e18;  // which no memory holds
    double total = 0.0;
    for (const ClickFeature* one : of_.jagged_) {
      std::vector<double> counts;  // of each example
      for (const std::string& name : one->of) {
        const ClickFeature& source = of_.named(name);
        const std::vector<std::size_t> its = counts_in(range_of(source.column));
        const bool is_first = counts.empty();
        counts.resize(examples_, 1.0);
        for (std::size_t i = 0; i < examples_; ++i) {
          counts[i] *= static_cast<double>(source.max_len == 0 ? its[i] : std::min(its[i], source.max_len));
          total += is_first ? 0.0 : counts[i];
        }
      }
    }
    return static_cast<std::uint64_t>(std::min(total, kMost));
  }

 private:
  struct Range {
    std::size_t first;
    std::size_t last;
    std::size_t size() const noexcept { return last - first; }
  };

  // Positions in order_ of a column's features, in the order of the examples.
  Range range_of(const std::string& column) const noexcept {
    const std::size_t place = of_.places_.find(column)->second;
    return {ends_[place], ends_[place + 1]};
  }
  std::uint64_t key(std::size_t at) const noexcept { return features_.keys[order_[at]]; }
  float value(std::size_t at) const noexcept {
    return features_.values.empty() ? 1.0F : features_.values[order_[at]];
  }

  [[noreturn]] static void refuse(std::size_t example, const std::string& what) {
    throw BadExample(static_cast<std::int64_t>(example),
                     "instance " + std::to_string(example) + " has " + what);
  }

  Range single(const ClickFeature& one) const {
    const Range range = range_of(one.column);
    for (std::size_t at = range.first + 1; at < range.last; ++at) {
      if (example_[at] == example_[at - 1]) {
        refuse(example_[at],
               "more than one feature of " + in_quotes(one.column) + ": its feature is no list");
      }
    }
    return range;
  }

  std::uint64_t single_key(const ClickFeature& one, std::size_t at) const noexcept {
    if (one.type != FeatureType::kBucket) {
      return key(at);
    }
    const auto above = std::upper_bound(one.edges.begin(), one.edges.end(), static_cast<double>(value(at)));
    return of_.buckets_.find(one.name)->second[static_cast<std::size_t>(above - one.edges.begin())];
  }

  void put_fixed(const ClickFeature& one, std::size_t j, ClickInputs& into) const {
    const std::size_t fixed = of_.fixed();
    if (one.type == FeatureType::kCross) {
      const Jagged crossed = crossing(one);
      for (std::size_t i = 0; i < examples_; ++i) {
        if (!crossed.of(i).empty()) {
          into.keys[i * fixed + j] = crossed.of(i).back();
        }
      }
      return;
    }
    const Range range = single(one);
    for (std::size_t at = range.first; at < range.last; ++at) {
      into.keys[example_[at] * fixed + j] = single_key(one, at);
      if (one.type != FeatureType::kBucket) {
        into.values[example_[at] * fixed + j] = value(at);
      }
    }
  }

  void put_dense(ClickInputs& into) const {
    const std::size_t width = of_.dense_width();
    into.dense.assign(examples_ * width, 0.0F);
    std::size_t column = 0;
    for (const ClickFeature* one : of_.dense_) {
      const Range range = one->type == FeatureType::kVector ? range_of(one->column) : single(*one);
      std::vector<std::size_t> counts(examples_, 0);
      for (std::size_t at = range.first; at < range.last; ++at) {
        const std::size_t k = counts[example_[at]]++;
        if (k < one->size) {
          const float number = value(at);
          into.dense[example_[at] * width + column + k] =
              one->log ? std::copysign(std::log1p(std::abs(number)), number) : number;
        }
      }
      for (std::size_t i = 0; i < examples_; ++i) {
        if (counts[i] != 0 && counts[i] != one->size) {
          refuse(i, std::to_string(counts[i]) + " numbers in vector " + in_quotes(one->column) +
                        ", whose size is " + std::to_string(one->size));
        }
      }
      column += one->size;
    }
  }

  std::vector<std::size_t> counts_in(const Range& range) const {
    std::vector<std::size_t> counts(examples_, 0);
    for (std::size_t at = range.first; at < range.last; ++at) {
      ++counts[example_[at]];
    }
    return counts;
  }

  static constexpr std::size_t kNone = ~std::size_t{0};

  // The positions of a column that has one feature for each item; kNone for those of an example without any.
  std::vector<std::size_t> beside(const ClickFeature& one, const std::string& column,
                                  const std::vector<std::size_t>& counts) const {
    const Range range = range_of(column);
    const std::vector<std::size_t> its = counts_in(range);
    std::vector<std::size_t> found;
    std::size_t at = range.first;
    for (std::size_t i = 0; i < examples_; ++i) {
      if (its[i] != 0 && its[i] != counts[i]) {
        refuse(i, std::to_string(counts[i]) + " items in " + in_quotes(one.name) + " and " +
                      std::to_string(its[i]) + " in " + in_quotes(column) +
                      ", which has one for each: write a missing one as an empty item");
      }
      for (std::size_t k = 0; k < counts[i]; ++k) {
        found.push_back(its[i] == 0 ? kNone : at + k);
      }
      at += its[i];
    }
    return found;
  }

  ClickItems items(const ClickFeature& one) const {
    ClickItems found;
    if (one.type == FeatureType::kCross) {
      Jagged crossed = crossing(one);
      found.offsets = std::move(crossed.offsets);
      found.keys = std::move(crossed.keys);
      found.weights.assign(found.keys.size(), 1.0F);
      return found;
    }
    const Range range = range_of(one.column);
    const std::vector<std::size_t> counts = counts_in(range);
    // Which of the items are kept.
    std::vector<std::size_t> kept;
    found.offsets.push_back(0);
    std::size_t begin = 0;
    for (const std::size_t count : counts) {
      const std::size_t size = one.max_len == 0 ? count : std::min(count, one.max_len);
      const std::size_t first = begin + (one.keeps_last ? count - size : 0);
      for (std::size_t k = 0; k < size; ++k) {
        kept.push_back(first + k);
      }
      begin += count;
      found.offsets.push_back(static_cast<std::int64_t>(kept.size()));
    }
    const auto number_at = [&](std::size_t at) { return at == kNone ? 0.0F : value(at); };
    const std::vector<std::size_t> weights =
        one.weights.empty() ? std::vector<std::size_t>() : beside(one, one.weights, counts);
    for (const std::size_t k : kept) {
      found.keys.push_back(key(range.first + k));
      found.weights.push_back(one.weights.empty() ? value(range.first + k) : number_at(weights[k]));
    }
    for (const auto& [column, share] : one.sides) {
      const std::vector<std::size_t> at = beside(one, column, counts);
      const std::uint64_t missing = of_.side_missing_.find(share)->second;
      for (const std::size_t k : kept) {
        found.sides[column].push_back(at[k] == kNone ? missing : key(at[k]));
      }
      found.sides.try_emplace(column);
    }
    found.numeric.resize(kept.size() * one.side_numeric.size());
    for (std::size_t c = 0; c < one.side_numeric.size(); ++c) {
      const std::vector<std::size_t> at = beside(one, one.side_numeric[c], counts);
      for (std::size_t k = 0; k < kept.size(); ++k) {
        found.numeric[k * one.side_numeric.size() + c] = number_at(at[kept[k]]);
      }
    }
    return found;
  }

  // The combinations of the features of a cross.
  Jagged crossing(const ClickFeature& one) const {
    Jagged found = source(of_.named(one.of.front()));
    for (std::size_t k = 1; k < one.of.size(); ++k) {
      found = pairs_of(found, source(of_.named(one.of[k])));
    }
    return found;
  }

  Jagged source(const ClickFeature& one) const {
    if (of_.is_jagged(one)) {
      ClickItems its = items(one);
      return {std::move(its.offsets), std::move(its.keys)};
    }
    const Range range = single(one);
    Jagged found{.offsets = {0}, .keys = {}};
    std::size_t at = range.first;
    for (std::size_t i = 0; i < examples_; ++i) {
      for (; at < range.last && example_[at] == i; ++at) {
        found.keys.push_back(single_key(one, at));
      }
      found.offsets.push_back(static_cast<std::int64_t>(found.keys.size()));
    }
    return found;
  }

  const ClickFeatures& of_;
  const Features& features_;
  std::size_t examples_;
  std::vector<std::size_t> order_;    // features by column, then by example
  std::vector<std::size_t> example_;  // of each of them
  std::vector<std::size_t> ends_;     // of columns in order_; those of no column come last
};

ClickInputs ClickFeatures::arrange(const Features& features) const {
  return Arranging(*this, features).arrange();
}

std::uint64_t ClickFeatures::crossed_items(const Features& features) const {
  const bool has_some =
      std::any_of(jagged_.begin(), jagged_.end(), [](const auto* one) { return !one->of.empty(); });
  return has_some ? Arranging(*this, features).crossed_items() : 0;
}

std::uint64_t ClickFeatures::example_bytes() const noexcept {
  constexpr std::uint64_t kCounts = 2 * sizeof(std::size_t);
  return fixed_.size() * (sizeof(std::uint64_t) + sizeof(float)) + dense_width_ * sizeof(float) +
         (dense_.size() + jagged_.size()) * kCounts;
}

std::uint64_t ClickFeatures::feature_bytes() const noexcept {
  std::uint64_t bytes = 3 * sizeof(std::size_t);  // its place in the order
  for (const ClickFeature* one : jagged_) {
    const std::uint64_t sides = one->sides.size() + one->side_numeric.size() + (one->weights.empty() ? 0 : 1);
    bytes += (3 + 2 * sides) * sizeof(std::uint64_t);
  }
  return bytes;
}

}  // namespace shoal::predict
