#include "optim/sgd.h"

#include "base/simd.h"

namespace shoal {

namespace {

SHOAL_CLONES void steps(std::size_t n, float lr, float weight_decay, const float* g, float* w) noexcept {
  for (std::size_t e = 0; e < n; ++e) {
    w[e] -= lr * (g[e] + weight_decay * w[e]);
  }
}

}  // namespace

Sgd::Sgd(Params& params)
    : lr(static_cast<float>(params.positive("lr"))),
      weight_decay(static_cast<float>(params.non_negative("weight_decay"))) {}

void Sgd::start(const Block& /*block*/) const noexcept {}

void Sgd::step(const Block& block) const noexcept {
  steps(block.size(), lr, weight_decay, block.grads, block.columns[0]);
}

}  // namespace shoal
