// Momentum (Polyak; Nesterov's form as in Sutskever et al., ICML'13), v and lr kept apart as in torch
// (dampening 0):
//
//   v = mu * v + g;   w -= lr * v        or, nesterov,   w -= lr * (g + mu * v)
//
// v starts at 0. Rows that a push does not touch keep v, as in TensorFlow; torch's dense rule decays them.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Momentum {
  static constexpr std::string_view kName = "Momentum";
  static constexpr std::array<std::string_view, 2> kColumns{"w", "v"};
  static constexpr bool kDerivesWeights = false;

  explicit Momentum(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;

  float lr;
  float mu;
  bool nesterov;
  float weight_decay;
};

}  // namespace shoal
