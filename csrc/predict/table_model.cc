#include "predict/table_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "kernel/examples.h"
#include "kernel/fm.h"
#include "kernel/logistic.h"

namespace shoal::predict {

namespace {

// The second sum of a feature's scale is stored times this (docs/export-format.md).
constexpr double kShrink = 0x1p-40;

const ExportReader* table_of(const std::function<const ExportReader*(std::string_view)>& table,
                             const ModelDescription& description, std::size_t i) {
  SHOAL_CHECK(i < description.tables.size(),
              "the model names " + std::to_string(description.tables.size()) + " tables, and needs more");
  const std::string& name = description.tables[i];
  const ExportReader* const found = table(name);
  SHOAL_CHECK(found != nullptr, "the export has no table '" + name + "', which its model names");
  return found;
}

void check_dim(const ExportReader& table, std::size_t dim, const std::string& name) {
  SHOAL_CHECK(table.form().dim() == dim, "table '" + name + "' has rows of " +
                                             std::to_string(table.form().dim()) +
                                             " numbers, and the model needs " + std::to_string(dim));
}

}  // namespace

TableModel::TableModel(ModelDescription description,
                       const std::function<const ExportReader*(std::string_view)>& table)
    : description_(std::move(description)) {
  const auto& names = description_.tables;
  weights_ = table_of(table, description_, 0);
  std::size_t next = 1;
  if (description_.kind == ModelDescription::Kind::kFactorization) {
    factors_ = table_of(table, description_, next++);
  }
  if (!is_multiclass()) {
    check_dim(*weights_, 1, names[0]);
  }
  if (description_.is_normalized) {
    sums_ = table_of(table, description_, next);
    check_dim(*sums_, 2, names[next++]);
  }
  SHOAL_CHECK(names.size() == next, "the model names " + std::to_string(names.size()) +
                                        " tables, and needs " + std::to_string(next));
  if (description_.has_bias) {
    bias_.resize(weights_->form().dim());
    ThreadPool pool(1);
    weights_->pull(std::array{kBiasKey}, ExportReader::KeyKind::kKey, bias_, pool);
  }
}

std::uint64_t TableModel::bytes(const Features& features) const {
  const std::size_t factors = factors_ == nullptr ? 0 : factors_->form().dim();
  const std::size_t sums = sums_ == nullptr ? 0 : 3;  // with the divided value
  return features.keys.size() *
         (sizeof(std::uint32_t) + sizeof(float) * (weights_->form().dim() + std::max(factors, sums)));
}

// The values of the features, each divided by its scale.
std::span<const float> TableModel::divided(const Features& features, ModelScratch& scratch,
                                           ThreadPool& pool) const {
  const std::size_t entries = features.keys.size();
  const std::span<float> sums = scratch.more.claim(2 * entries);
  sums_->pull(features.keys, ExportReader::KeyKind::kKey, sums, pool);
  const std::span<float> values = scratch.values.claim(entries);
  for (std::size_t e = 0; e < entries; ++e) {
    const auto count = static_cast<double>(sums[2 * e]);
    const auto squares = static_cast<double>(sums[2 * e + 1]);
    const double mean = count > 0.0 && squares > 0.0 ? squares / count : kShrink;
    const double value = features.values.empty() ? 1.0 : static_cast<double>(features.values[e]);
    values[e] = static_cast<float>(value / std::sqrt(mean / kShrink));
  }
  return values;
}

void TableModel::probabilities(const Features& features, std::span<double> out, ModelScratch& scratch,
                               ThreadPool& pool) const {
  const std::size_t entries = features.keys.size();
  const std::size_t examples = features.examples();
  const std::size_t classes = outputs();
  SHOAL_CHECK(out.size() == examples * classes, "probabilities must have " + std::to_string(classes) +
                                                    " numbers for each of the " + std::to_string(examples) +
                                                    " examples, got " + std::to_string(out.size()));
  if (scratch.entries.size() < entries) {
    const std::size_t before = scratch.entries.size();
    scratch.entries.resize(entries + entries / 4);
    std::iota(scratch.entries.begin() + static_cast<std::ptrdiff_t>(before), scratch.entries.end(),
              static_cast<std::uint32_t>(before));
  }
  const bool has_bias = description_.has_bias;
  const std::size_t rows = entries + (has_bias ? 1 : 0);
  const Examples taken{
      .indptr = features.offsets,
      .columns = std::span(scratch.entries).first(entries),
      .values = sums_ == nullptr ? features.values : divided(features, scratch, pool),
      .bias = has_bias ? std::optional(static_cast<std::uint32_t>(entries)) : std::nullopt,
      .below = rows,
  };
  check_examples(taken, rows);
  const std::span<float> weights = scratch.weights.claim(rows * classes);
  weights_->pull(features.keys, ExportReader::KeyKind::kKey, weights.first(entries * classes), pool);
  if (has_bias) {
    std::copy(bias_.begin(), bias_.end(), weights.end() - static_cast<std::ptrdiff_t>(classes));
  }
  if (is_multiclass()) {
    const std::span<float> column = scratch.column.claim(rows);
    const std::span<double> margin = scratch.margins.claim(examples);
    for (std::size_t k = 0; k < classes; ++k) {
      for (std::size_t e = 0; e < rows; ++e) {
        column[e] = weights[e * classes + k];
      }
      margins(taken, column, margin, pool);
      for (std::size_t i = 0; i < examples; ++i) {
        out[i * classes + k] = margin[i];
      }
    }
    class_probabilities(out, classes, description_.loss);
    return;
  }
  if (factors_ == nullptr) {
    margins(taken, weights, out, pool);
  } else {
    const std::size_t dim = factors_->form().dim();
    const std::span<float> factors = scratch.more.claim(rows * dim);
    factors_->pull(features.keys, ExportReader::KeyKind::kKey, factors.first(entries * dim), pool);
    std::fill(factors.begin() + static_cast<std::ptrdiff_t>(entries * dim), factors.end(), 0.0F);
    fm_margins(taken, weights, factors, dim, out, scratch.sums.claim(examples * dim), pool);
  }
  description_.calibration.apply(out);
  shoal::probabilities(out, out, pool);
}

}  // namespace shoal::predict
