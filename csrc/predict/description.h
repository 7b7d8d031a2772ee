// The description of a model in an export's manifest (docs/export-format.md).
//
// Threads: pure functions.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernel/calibration.h"
#include "predict/json.h"

namespace shoal::predict {

// Of the calibration of margins.
struct Calibration {
  enum class Kind : std::uint8_t { kNone, kPlatt, kIsotonic };

  Kind kind = Kind::kNone;
  double slope = 1.0;
  double intercept = 0.0;
  std::vector<double> at;
  std::vector<double> probabilities;

  void apply(std::span<double> margins) const noexcept;
};

// Of a model that is made of tables alone.
struct ModelDescription {
  enum class Kind : std::uint8_t { kLogistic, kFactorization, kMulticlass };

  Kind kind = Kind::kLogistic;
  std::vector<std::string> tables;  // in the order of table_model.h
  bool has_bias = false;
  bool is_normalized = false;
  ClassLoss loss = ClassLoss::kMultinomial;
  Calibration calibration;
};

// std::invalid_argument: it is of a kind that is not made of tables alone, or a part is missing or wrong.
ModelDescription read_description(const json::object& model);
// std::invalid_argument: it is of a kind that is not known, or wrong.
Calibration read_calibration(const json::object& model);

}  // namespace shoal::predict
