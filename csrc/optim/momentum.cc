#include "optim/momentum.h"

#include <algorithm>

#include "base/simd.h"

namespace shoal {

namespace {

SHOAL_CLONES void steps(std::size_t n, const Momentum& rule, const float* g, float* w, float* v) noexcept {
  const float lr = rule.lr;
  const float mu = rule.mu;
  const float weight_decay = rule.weight_decay;
  const bool nesterov = rule.nesterov;
  for (std::size_t e = 0; e < n; ++e) {
    const float slope = g[e] + weight_decay * w[e];
    const float speed = mu * v[e] + slope;
    w[e] -= lr * (nesterov ? slope + mu * speed : speed);
    v[e] = speed;
  }
}

}  // namespace

Momentum::Momentum(Params& params)
    : lr(static_cast<float>(params.positive("lr"))),
      mu(static_cast<float>(params.below_one("mu"))),
      nesterov(params.flag("nesterov")),
      weight_decay(static_cast<float>(params.non_negative("weight_decay"))) {}

void Momentum::start(const Block& block) const noexcept { std::fill_n(block.columns[1], block.size(), 0.0F); }

void Momentum::step(const Block& block) const noexcept {
  steps(block.size(), *this, block.grads, block.columns[0], block.columns[1]);
}

}  // namespace shoal
