// Model: predictions of an exported model, from keys.
//
// Algorithm. The weights of an example's keys are looked up as they are given, neither sorted nor deduplicated: a
// request has few examples. The kernels then take each entry as a key of its own. They add entries in the
// order of the example, so the probabilities have the same bits as those of a batch whose keys are sorted.
//
//   kind        tables
//   logistic    weights, dim 1
//   multiclass  weights, dim = classes
//   FM          weights, dim 1; factors
//   each of them, normalized: also the sums by whose mean square values are divided (dim 2)
//
// Threads: immutable; any number of callers. A Scratch is one caller's memory, and keeps it from call to call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/threads.h"
#include "export/export_reader.h"
#include "kernel/calibration.h"

namespace shoal::predict {

// The features of some examples: example i has those from offsets[i] to offsets[i + 1].
struct Features {
  std::span<const std::int64_t> offsets;
  std::span<const std::uint64_t> keys;
  std::span<const float> values;  // one for each key; empty: each is 1

  std::size_t examples() const noexcept { return offsets.empty() ? 0 : offsets.size() - 1; }
};

struct ModelScratch {
  Buffer<float> weights;
  Buffer<float> more;
  Buffer<float> values;
  Buffer<float> column;
  Buffer<double> margins;
  Buffer<double> sums;
  std::vector<std::uint32_t> entries;  // 0, 1, ...
};

// What an export says of the calibration of its margins (docs/export-format.md).
struct Calibration {
  enum class Kind : std::uint8_t { kNone, kPlatt, kIsotonic };

  Kind kind = Kind::kNone;
  double slope = 1.0;
  double intercept = 0.0;
  std::vector<double> at;
  std::vector<double> probabilities;

  void apply(std::span<double> margins) const noexcept;
};

// What an export says of its model.
struct ModelDescription {
  enum class Kind : std::uint8_t { kLogistic, kFactorization, kMulticlass };

  Kind kind = Kind::kLogistic;
  std::vector<std::string> tables;  // in the order above
  bool has_bias = false;
  bool is_normalized = false;
  ClassLoss loss = ClassLoss::kMultinomial;
  Calibration calibration;
};

class Model {
 public:
  // `table` returns a table by its name; null if there is none. std::invalid_argument: the tables do not fit
  // the description. They must outlive the model.
  Model(ModelDescription description, const std::function<const ExportReader*(std::string_view)>& table);

  // Probabilities of an example: 1, or one for each class.
  std::size_t outputs() const noexcept { return is_multiclass() ? weights_->form().dim() : 1; }
  // Memory that a prediction takes for each feature.
  std::size_t feature_bytes() const noexcept;
  bool is_multiclass() const noexcept { return description_.kind == ModelDescription::Kind::kMulticlass; }

  // Writes outputs() numbers for each example. std::invalid_argument: the features do not match each other.
  void probabilities(const Features& features, std::span<double> out, ModelScratch& scratch,
                     ThreadPool& pool) const;

 private:
  // The key of the constant feature (docs/export-format.md).
  static constexpr std::uint64_t kBiasKey = 0x1208DA918DB99F36U;

  std::span<const float> divided(const Features& features, ModelScratch& scratch, ThreadPool& pool) const;

  ModelDescription description_;
  const ExportReader* weights_ = nullptr;
  const ExportReader* factors_ = nullptr;
  const ExportReader* sums_ = nullptr;
  std::vector<float> bias_;  // its row
};

}  // namespace shoal::predict
