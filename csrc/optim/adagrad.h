// Adagrad (Duchi, Hazan, Singer, JMLR'11), as in torch, TensorFlow's ApplyAdagradV2 and FBGEMM:
//
//   n += g^2;   w -= lr * g / (sqrt(n) + eps)             L2 weight decay as in torch: g += weight_decay * w
//
// n is an accumulator: it is rounded stochastically (base/noise.h), or it would stop growing at 2^22 for |g|
// = 0.5.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Adagrad {
  static constexpr std::string_view kName = "Adagrad";
  static constexpr std::array<std::string_view, 2> kColumns{"w", "n"};
  static constexpr bool kDerivesWeights = false;
  static constexpr bool kAddsUp = true;

  explicit Adagrad(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;

  float lr;
  float eps;
  float n0;
  float weight_decay;
};

}  // namespace shoal
