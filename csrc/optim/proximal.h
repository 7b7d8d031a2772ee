// Proximal: one step of (diagonally scaled) proximal gradient for an L1 penalty (Li et al., OSDI'14, section
// 5.1, whose Algorithm 3 misprints the operator). A row is a pair, and so is its gradient:
//
//   row (w, g of its last step)      pushed (g, u): the gradient, and a bound u of the curvature; workers'
//                                    pairs are added
//
//   v = w - lr * g / u;   w = sgn(v) * max(|v| - lr * l1 / u, 0);   u <= 0: the row stays
//
// In float64, rounded once. The gradient is stored so that a worker that pulls w can decide whether to skip
// the key: if w = 0 and |g| is well below l1, the next step would leave it at 0 (the KKT filter).

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"

namespace shoal {

struct Proximal {
  static constexpr std::string_view kName = "Proximal";
  static constexpr std::array<std::string_view, 1> kColumns{"w"};
  static constexpr bool kDerivesWeights = false;
  static constexpr bool kPairs = true;

  explicit Proximal(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;

  double lr;
  double l1;
};

}  // namespace shoal
