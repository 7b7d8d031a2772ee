#include "optim/proximal.h"

#include <cmath>

namespace shoal {

Proximal::Proximal(Params& params) : lr(params.positive("lr")), l1(params.non_negative("l1")) {}

void Proximal::start(const Block& /*block*/) const noexcept {}

void Proximal::step(const Block& block) const noexcept {
  float* const rows = block.columns[0];
  for (std::size_t e = 0; e + 1 < block.size(); e += 2) {
    const float g = block.grads[e];
    const float u = block.grads[e + 1];
    if (!(u > 0)) {
      continue;
    }
    const double rate = lr / static_cast<double>(u);
    const double v = static_cast<double>(rows[e]) - rate * static_cast<double>(g);
    const double left = std::abs(v) - rate * l1;
    rows[e] = left > 0 ? static_cast<float>(std::copysign(left, v)) : 0.0F;
    rows[e + 1] = g;
  }
}

}  // namespace shoal
