#include "optim/momentum.h"

#include <algorithm>

#include "base/simd.h"

namespace shoal {

namespace {

// One element's step; x is (w, v).
struct Element {
  float lr;
  float mu;
  float weight_decay;
  bool nesterov;

  explicit Element(const Momentum& rule)
      : lr(rule.lr), mu(rule.mu), weight_decay(rule.weight_decay), nesterov(rule.nesterov) {}

  SHOAL_INLINE void operator()(float g, std::uint32_t /*noise*/, std::array<float, 2>& x) const noexcept {
    auto& [w, v] = x;
    const float slope = g + weight_decay * w;
    v = mu * v + slope;
    w -= lr * (nesterov ? slope + mu * v : v);
  }
};

SHOAL_CLONES void steps(std::size_t n, const Momentum& rule, const float* g, float* w, float* v) noexcept {
  const Element element(rule);
  for (std::size_t e = 0; e < n; ++e) {
    std::array<float, 2> x{w[e], v[e]};
    element(g[e], 0, x);
    w[e] = x[0];
    v[e] = x[1];
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Momentum& rule) noexcept {
  return in_place::step<2>(rows, in_place::Alike<Element>{Element(rule)});
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

std::size_t Momentum::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

}  // namespace shoal
