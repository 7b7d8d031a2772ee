#include "predict/description.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

#include "base/check.h"

namespace shoal::predict {

namespace {

ModelDescription::Kind kind_of(const std::string& name) {
  if (name == "logistic regression") {
    return ModelDescription::Kind::kLogistic;
  }
  if (name == "factorization machine") {
    return ModelDescription::Kind::kFactorization;
  }
  SHOAL_CHECK(
      name == "multiclass regression",
      "a " + name + " is not made of tables alone: its rows can be read, and its network runs elsewhere");
  return ModelDescription::Kind::kMulticlass;
}

}  // namespace

void Calibration::apply(std::span<double> margins) const noexcept {
  if (kind == Kind::kPlatt) {
    platt(margins, slope, intercept);
  } else if (kind == Kind::kIsotonic) {
    isotonic(margins, at, probabilities);
  }
}

Calibration read_calibration(const json::object& model) {
  Calibration into;
  const json::value* const described = optional_in(model, "calibration");
  if (described == nullptr) {
    return into;
  }
  SHOAL_CHECK(described->is_object(), "'calibration' is not an object");
  const json::object& given = described->get_object();
  const std::string kind = text_in(given, "kind");
  if (kind == "platt") {
    into.kind = Calibration::Kind::kPlatt;
    into.slope = number_in(given, "slope");
    into.intercept = number_in(given, "intercept");
    SHOAL_CHECK(std::isfinite(into.slope) && std::isfinite(into.intercept), "the calibration is not finite");
    return into;
  }
  SHOAL_CHECK(kind == "isotonic", "calibration '" + kind + "' is not known: it is platt or isotonic");
  into.kind = Calibration::Kind::kIsotonic;
  into.at = numbers_in(given, "at");
  into.probabilities = numbers_in(given, "probabilities");
  SHOAL_CHECK(!into.at.empty() && into.at.size() == into.probabilities.size(),
              "the calibration has " + std::to_string(into.at.size()) + " margins and " +
                  std::to_string(into.probabilities.size()) + " probabilities");
  SHOAL_CHECK(std::adjacent_find(into.at.begin(), into.at.end(), std::greater_equal<>()) == into.at.end(),
              "the margins of the calibration do not ascend");
  SHOAL_CHECK(std::is_sorted(into.probabilities.begin(), into.probabilities.end()) &&
                  into.probabilities.front() > 0.0 && into.probabilities.back() < 1.0,
              "the probabilities of the calibration leave (0, 1) or fall");
  return into;
}

ModelDescription read_description(const json::object& model) {
  ModelDescription found;
  found.kind = kind_of(text_in(model, "kind"));
  found.tables.push_back(text_in(model, "table"));
  for (const json::value& name : array_in(model, "more_tables")) {
    found.tables.push_back(text_of(name, "more_tables"));
  }
  found.has_bias = flag_in(model, "bias", false);
  found.is_normalized = flag_in(model, "normalized", false);
  found.calibration = read_calibration(model);
  if (found.kind == ModelDescription::Kind::kMulticlass) {
    const std::string loss = text_in(object_in(model, "multiclass"), "loss");
    SHOAL_CHECK(loss == "multinomial" || loss == "ovr", "loss '" + loss + "' is not known");
    found.loss = loss == "ovr" ? ClassLoss::kOneVersusRest : ClassLoss::kMultinomial;
  }
  return found;
}

}  // namespace shoal::predict
