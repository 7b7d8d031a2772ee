#include "optim/adagrad.h"

#include <algorithm>
#include <cmath>

#include "base/noise.h"

namespace shoal {

namespace {

SHOAL_CLONES void steps(std::size_t count, const Adagrad& rule, const std::uint32_t* noise, const float* g,
                        float* w, float* n) noexcept {
  const float lr = rule.lr;
  const float eps = rule.eps;
  const float weight_decay = rule.weight_decay;
  for (std::size_t e = 0; e < count; ++e) {
    const float slope = g[e] + weight_decay * w[e];
    const float next = accumulate(n[e], static_cast<double>(slope) * static_cast<double>(slope), noise[e], 1);
    // n0 = eps = 0 and no slope: 0 / 0, where there is no step to make.
    w[e] -= slope == 0.0F ? 0.0F : lr * slope / (std::sqrt(next) + eps);
    n[e] = next;
  }
}

}  // namespace

Adagrad::Adagrad(Params& params)
    : lr(static_cast<float>(params.positive("lr"))),
      eps(static_cast<float>(params.non_negative("eps"))),
      n0(static_cast<float>(params.non_negative("n0"))),
      weight_decay(static_cast<float>(params.non_negative("weight_decay"))) {}

void Adagrad::start(const Block& block) const noexcept { std::fill_n(block.columns[1], block.size(), n0); }

void Adagrad::step(const Block& block) const noexcept {
  steps(block.size(), *this, block.noise, block.grads, block.columns[0], block.columns[1]);
}

}  // namespace shoal
