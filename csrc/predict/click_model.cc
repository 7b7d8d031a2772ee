#include "predict/click_model.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kernel/logistic.h"

namespace shoal::predict {

namespace {

using TableByName = std::function<const ExportReader*(std::string_view)>;

constexpr const char* kSources = "shoal.rows";  // in the metadata of the graph

std::int64_t length(std::size_t count) noexcept { return static_cast<std::int64_t>(count); }

}  // namespace

ClickModel::ClickModel(const json::object& description, std::shared_ptr<const OnnxRuntime> runtime,
                       std::string_view tower, const TableByName& table)
    : features_(object_in(object_in(description, "click"), "features")),
      calibration_(read_calibration(description)),
      graph_(std::move(runtime), tower) {
  const json::value parsed = parse_json(graph_.metadata(kSources));
  SHOAL_CHECK(parsed.is_object(), "the graph does not say whose rows it takes");
  const json::object& sources = parsed.get_object();
  for (const std::string& name : graph_.inputs()) {
    const json::value* const source = optional_in(sources, name);
    SHOAL_CHECK(source == nullptr || source->is_object(),
                "the graph does not say whose rows '" + name + "' are");
    inputs_.push_back(source == nullptr ? numbers_of(name) : rows_of(source->get_object(), table));
  }
}

ClickModel::Input ClickModel::rows_of(const json::object& source, const TableByName& table) const {
  Input found;
  const std::string name = text_in(source, "table");
  found.table = table(name);
  SHOAL_CHECK(found.table != nullptr, "the export has no table '" + name + "', whose rows the graph takes");
  if (const json::value* const items = optional_in(source, "items"); items != nullptr) {
    found.kind = Input::Kind::kItemRows;
    found.items = features_.jagged(text_of(*items, "items")).name;
    if (const json::value* const side = optional_in(source, "side"); side != nullptr) {
      found.kind = Input::Kind::kSideRows;
      found.side = text_of(*side, "side");
      const auto& sides = features_.jagged(found.items).sides;
      SHOAL_CHECK(
          std::any_of(sides.begin(), sides.end(), [&](const auto& one) { return one.first == found.side; }),
          "the graph takes rows of '" + found.side + "', which is not beside '" + found.items + "'");
    }
    return found;
  }
  for (const json::value& field : array_in(source, "fields")) {
    found.columns.push_back(features_.index_of(text_of(field, "fields")));
  }
  return found;
}

ClickModel::Input ClickModel::numbers_of(std::string_view name) const {
  Input found;
  if (name == "values") {
    found.kind = Input::Kind::kValues;
    return found;
  }
  if (name == "dense") {
    found.kind = Input::Kind::kDense;
    return found;
  }
  const std::size_t slash = name.find('/');
  const std::string_view kind = name.substr(0, slash);
  SHOAL_CHECK(
      slash != std::string_view::npos && (kind == "offsets" || kind == "weights" || kind == "numeric"),
      "the graph takes '" + std::string(name) + "', which is not known");
  const ClickFeature& of = features_.jagged(name.substr(slash + 1));
  found.kind = kind == "offsets"   ? Input::Kind::kOffsets
               : kind == "weights" ? Input::Kind::kWeights
                                   : Input::Kind::kNumeric;
  found.items = of.name;
  found.width = of.side_numeric.size();
  return found;
}

std::uint64_t ClickModel::bytes(const Features& features) const {
  std::uint64_t of_example = features_.example_bytes();
  std::uint64_t of_item = 0;
  for (const Input& input : inputs_) {
    const std::uint64_t row = input.table == nullptr ? 0 : input.table->form().dim() * sizeof(float);
    of_example += input.columns.size() * (sizeof(std::uint64_t) + row);
    of_item += input.items.empty() ? 0 : row;
  }
  return features.examples() * of_example + features.keys.size() * (features_.feature_bytes() + of_item) +
         features_.crossed_items(features) * (ClickFeatures::kCrossedBytes + of_item);
}

void ClickModel::margins(const Features& features, std::span<double> out, ThreadPool& pool) const {
  const ClickInputs x = features_.arrange(features);
  const std::size_t n = x.examples;
  SHOAL_CHECK(out.size() == n, "there is one margin for each example");
  if (n == 0) {
    return;
  }
  const std::size_t fixed = features_.fixed();
  std::vector<std::vector<float>> rows(inputs_.size());
  std::vector<OnnxInput> given(inputs_.size());
  for (std::size_t k = 0; k < inputs_.size(); ++k) {
    const Input& input = inputs_[k];
    const ClickItems* const items = input.items.empty() ? nullptr : &x.items.find(input.items)->second;
    const auto pull = [&](std::span<const std::uint64_t> keys) {
      rows[k].resize(keys.size() * input.table->form().dim());
      input.table->pull(keys, ExportReader::KeyKind::kKey, rows[k], pool);
      given[k].data = rows[k].data();
    };
    switch (input.kind) {
      case Input::Kind::kRows: {
        std::vector<std::uint64_t> keys;
        keys.reserve(n * input.columns.size());
        for (std::size_t i = 0; i < n; ++i) {
          for (const std::size_t column : input.columns) {
            keys.push_back(x.keys[i * fixed + column]);
          }
        }
        pull(keys);
        given[k].shape = {length(n), length(input.columns.size()), length(input.table->form().dim())};
        break;
      }
      case Input::Kind::kItemRows:
      case Input::Kind::kSideRows: {
        const auto& keys =
            input.kind == Input::Kind::kItemRows ? items->keys : items->sides.find(input.side)->second;
        pull(keys);
        given[k].shape = {length(keys.size()), length(input.table->form().dim())};
        break;
      }
      case Input::Kind::kValues:
        given[k] = {.data = x.values.data(), .shape = {length(n), length(fixed)}};
        break;
      case Input::Kind::kDense:
        given[k] = {.data = x.dense.data(), .shape = {length(n), length(features_.dense_width())}};
        break;
      case Input::Kind::kOffsets:
        given[k] = {.data = items->offsets.data(), .is_float = false, .shape = {length(n + 1)}};
        break;
      case Input::Kind::kWeights:
        given[k] = {.data = items->weights.data(), .shape = {length(items->weights.size())}};
        break;
      case Input::Kind::kNumeric:
        given[k] = {.data = items->numeric.data(),
                    .shape = {length(items->keys.size()), length(input.width)}};
        break;
    }
  }
  const std::vector<float> margins = graph_.run(given);
  SHOAL_CHECK(margins.size() == n, "the graph gives " + std::to_string(margins.size()) + " margins for " +
                                       std::to_string(n) + " examples");
  std::copy(margins.begin(), margins.end(), out.begin());
}

void ClickModel::probabilities(const Features& features, std::span<double> out, ModelScratch& /*scratch*/,
                               ThreadPool& pool) const {
  margins(features, out, pool);
  calibration_.apply(out);
  shoal::probabilities(out, out, pool);
}

}  // namespace shoal::predict
