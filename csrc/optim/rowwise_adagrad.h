// RowWiseAdagrad: one accumulator per row (FBGEMM's EXACT_ROWWISE_ADAGRAD):
//
//   m += mean over the row of h^2;   k = lr / (sqrt(m) + eps);   w = c * w - k * g
//
//   no decay    h = g                       c = 1
//   L2          h = g + weight_decay * w    c = 1 - k * weight_decay
//   decoupled   h = g                       c = 1 - lr * weight_decay
//
// The mean is computed in float64 in element order; m is rounded stochastically. With dim 1 this is Adagrad.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct RowWiseAdagrad {
  static constexpr std::string_view kName = "RowWiseAdagrad";
  static constexpr std::array<std::string_view, 1> kColumns{"w"};
  static constexpr bool kDerivesWeights = false;
  static constexpr bool kAddsUp = true;

  explicit RowWiseAdagrad(Params& params);

  std::string_view row_state() const noexcept { return "m"; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;

  float lr;
  float eps;
  float weight_decay;
  bool decoupled;
};

}  // namespace shoal
