// SGD: w -= lr * g, with L2 weight decay as in torch: g += weight_decay * w.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Sgd {
  static constexpr std::string_view kName = "SGD";
  static constexpr std::array<std::string_view, 1> kColumns{"w"};
  static constexpr bool kDerivesWeights = false;
  static constexpr bool kAddsUp = true;

  explicit Sgd(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;

  float lr;
  float weight_decay;
};

}  // namespace shoal
