#include "optim/adagrad.h"

#include <algorithm>
#include <cmath>

#include "base/noise.h"

namespace shoal {

namespace {

// One element's step; x is (w, n).
struct Element {
  float lr;
  float eps;
  float weight_decay;

  explicit Element(const Adagrad& rule) : lr(rule.lr), eps(rule.eps), weight_decay(rule.weight_decay) {}

  SHOAL_INLINE void operator()(float g, std::uint32_t noise, std::array<float, 2>& x) const noexcept {
    auto& [w, n] = x;
    const float slope = g + weight_decay * w;
    const float next = accumulate(n, static_cast<double>(slope) * static_cast<double>(slope), noise, 1);
    // n0 = eps = 0 and no gradient: the step would be 0 / 0.
    w -= slope == 0.0F ? 0.0F : lr * slope / (std::sqrt(next) + eps);
    n = next;
  }
};

SHOAL_CLONES void steps(std::size_t count, const Adagrad& rule, const std::uint32_t* noise, const float* g,
                        float* w, float* n) noexcept {
  const Element element(rule);
  for (std::size_t e = 0; e < count; ++e) {
    std::array<float, 2> x{w[e], n[e]};
    element(g[e], noise[e], x);
    w[e] = x[0];
    n[e] = x[1];
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Adagrad& rule) noexcept {
  return in_place::step<2>(rows, in_place::Alike<Element>{Element(rule)});
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

std::size_t Adagrad::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

}  // namespace shoal
