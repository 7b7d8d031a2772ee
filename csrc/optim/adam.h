// Adam (Kingma, Ba, ICLR'15), lazy: only touched rows change, as in torch's SparseAdam, TensorFlow and Keras.
//
//   m += (1 - b1) * (g - m);   v += (1 - b2) * (g^2 - v)
//   w -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
//
// t is the table's step number, which the push passes; with per_row_step it is the row's own step number, one
// more word. Weight decay is L2 (g += weight_decay * w), or decoupled (Loshchilov, Hutter, ICLR'19: AdamW) on
// the touched rows: w *= 1 - lr * weight_decay before the step.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Adam {
  static constexpr std::string_view kName = "Adam";
  static constexpr std::string_view kDecoupledName = "AdamW";
  static constexpr std::array<std::string_view, 3> kColumns{"w", "m", "v"};
  static constexpr bool kDerivesWeights = false;

  explicit Adam(Params& params);

  std::string_view row_state() const noexcept { return per_row_step ? "t" : std::string_view{}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;

  double lr;
  double b1;
  double b2;
  float eps;
  double weight_decay;
  bool decoupled;
  bool per_row_step;
};

}  // namespace shoal
