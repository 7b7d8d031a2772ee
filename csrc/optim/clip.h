// Clip: bounds on the summed gradient of a row, applied before the rule sees it. Infinity means no bound.
//
//   value   each element is clamped to [-value, value]
//   norm    a row whose L2 norm is larger is scaled down to it     (Pascanu, Mikolov, Bengio, ICML'13)

#pragma once

#include <limits>

#include "optim/block.h"

namespace shoal {

struct Clip {
  float value = std::numeric_limits<float>::infinity();
  float norm = std::numeric_limits<float>::infinity();

  bool active() const noexcept {
    return value < std::numeric_limits<float>::infinity() || norm < std::numeric_limits<float>::infinity();
  }
  void apply(const Block& block) const noexcept;
};

}  // namespace shoal
