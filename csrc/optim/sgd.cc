#include "optim/sgd.h"

#include "base/simd.h"

namespace shoal {

namespace {

struct Element {
  float lr;
  float weight_decay;

  explicit Element(const Sgd& rule) : lr(rule.lr), weight_decay(rule.weight_decay) {}

  SHOAL_INLINE void operator()(float g, std::uint32_t /*noise*/, std::array<float, 1>& w) const noexcept {
    w[0] -= lr * (g + weight_decay * w[0]);
  }
};

SHOAL_CLONES void steps(std::size_t n, const Sgd& rule, const float* g, float* w) noexcept {
  const Element element(rule);
  for (std::size_t e = 0; e < n; ++e) {
    std::array<float, 1> x{w[e]};
    element(g[e], 0, x);
    w[e] = x[0];
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Sgd& rule) noexcept {
  return in_place::step<1>(rows, in_place::Alike<Element>{Element(rule)});
}

}  // namespace

Sgd::Sgd(Params& params)
    : lr(static_cast<float>(params.positive("lr"))),
      weight_decay(static_cast<float>(params.non_negative("weight_decay"))) {}

void Sgd::start(const Block& /*block*/) const noexcept {}

void Sgd::step(const Block& block) const noexcept {
  steps(block.size(), *this, block.grads, block.columns[0]);
}

std::size_t Sgd::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

}  // namespace shoal
