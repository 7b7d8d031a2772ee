#include "kernel/calibration.h"

#include <algorithm>
#include <cmath>

namespace shoal {

void platt(std::span<double> margins, double slope, double intercept) noexcept {
  for (double& margin : margins) {
    margin = slope * margin + intercept;
  }
}

void isotonic(std::span<double> margins, std::span<const double> at,
              std::span<const double> probabilities) noexcept {
  for (double& margin : margins) {
    if (std::isnan(margin)) {
      continue;
    }
    const auto above = static_cast<std::size_t>(std::upper_bound(at.begin(), at.end(), margin) - at.begin());
    double p = probabilities[above == 0 ? 0 : above - 1];
    if (above > 0 && above < at.size()) {
      const std::size_t k = above - 1;
      const double slope = (probabilities[above] - probabilities[k]) / (at[above] - at[k]);
      p = slope * (margin - at[k]) + probabilities[k];
    }
    margin = std::log(p) - std::log1p(-p);
  }
}

void class_probabilities(std::span<double> margins, std::size_t classes, ClassLoss loss) noexcept {
  for (std::size_t i = 0; i + classes <= margins.size(); i += classes) {
    const std::span<double> one = margins.subspan(i, classes);
    if (loss == ClassLoss::kOneVersusRest) {
      for (double& a : one) {
        a = std::min(a, 0.0) - std::log1p(std::exp(-std::abs(a)));  // log s: it does not underflow
      }
    }
    const double most = *std::max_element(one.begin(), one.end());
    double sum = 0.0;
    for (double& a : one) {
      a = std::exp(a - most);
      sum += a;
    }
    for (double& a : one) {
      a /= sum;
    }
  }
}

}  // namespace shoal
