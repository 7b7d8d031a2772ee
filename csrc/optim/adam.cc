#include "optim/adam.h"

#include <algorithm>
#include <cmath>

#include "base/simd.h"

namespace shoal {

namespace {

// The values that all elements with the same t share.
struct Factors {
  float rate;
  float take1;  // 1 - b1
  float take2;  // 1 - b2
  float eps;
  float l2;
  float kept;  // 1 - lr * weight_decay, or 1
};

Factors factors_at(const Adam& rule, double t) noexcept {
  return {.rate = static_cast<float>(rule.lr * std::sqrt(1.0 - std::pow(rule.b2, t)) /
                                     (1.0 - std::pow(rule.b1, t))),
          .take1 = static_cast<float>(1.0 - rule.b1),
          .take2 = static_cast<float>(1.0 - rule.b2),
          .eps = rule.eps,
          .l2 = rule.decoupled ? 0.0F : static_cast<float>(rule.weight_decay),
          .kept = rule.decoupled ? static_cast<float>(1.0 - rule.lr * rule.weight_decay) : 1.0F};
}

// One element's step; x is (w, m, v).
struct Element {
  Factors f;

  SHOAL_INLINE void operator()(float g, std::uint32_t /*noise*/, std::array<float, 3>& x) const noexcept {
    auto& [w, m, v] = x;
    const float slope = g + f.l2 * w;
    m = m + f.take1 * (slope - m);
    v = v + f.take2 * (slope * slope - v);
    const float root = std::sqrt(v) + f.eps;
    w = f.kept * w - (m == 0.0F ? 0.0F : f.rate * m / root);
  }
};

SHOAL_CLONES void steps(std::size_t count, const Factors& given, const float* g, float* w, float* m,
                        float* v) noexcept {
  const Element element{given};
  for (std::size_t e = 0; e < count; ++e) {
    std::array<float, 3> x{w[e], m[e], v[e]};
    element(g[e], 0, x);
    w[e] = x[0];
    m[e] = x[1];
    v[e] = x[2];
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Factors& factors) noexcept {
  return in_place::step<3>(rows, in_place::Alike<Element>{Element{factors}});
}

// Each row has its own step number.
struct OwnStep {
  Adam rule;

  SHOAL_INLINE Element operator()(const float*, const float*, std::size_t, std::uint32_t,
                                  float& t) const noexcept {
    t += 1.0F;  // stays at 2^24, at which the bias corrections are 1
    return {factors_at(rule, static_cast<double>(t))};
  }
};

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Adam& rule) noexcept {
  return in_place::step<3, true>(rows, OwnStep{rule});
}

}  // namespace

Adam::Adam(Params& params)
    : lr(params.positive("lr")),
      b1(params.below_one("b1")),
      b2(params.below_one("b2")),
      eps(static_cast<float>(params.non_negative("eps"))),
      weight_decay(params.non_negative("weight_decay")),
      decoupled(params.rule() == kDecoupledName),
      per_row_step(params.flag("per_row_step")) {}

void Adam::start(const Block& block) const noexcept {
  std::fill_n(block.columns[1], block.size(), 0.0F);
  std::fill_n(block.columns[2], block.size(), 0.0F);
  if (per_row_step) {
    std::fill_n(block.row_state, block.rows, 0.0F);
  }
}

void Adam::step(const Block& block) const noexcept {
  float* const w = block.columns[0];
  float* const m = block.columns[1];
  float* const v = block.columns[2];
  if (!per_row_step) {
    steps(block.size(), factors_at(*this, static_cast<double>(block.step)), block.grads, w, m, v);
    return;
  }
  for (std::size_t r = 0; r < block.rows; ++r) {
    const std::size_t first = r * block.dim;
    float& t = block.row_state[r];
    t += 1.0F;  // as in OwnStep
    steps(block.dim, factors_at(*this, static_cast<double>(t)), block.grads + first, w + first, m + first,
          v + first);
  }
}

std::size_t Adam::step(const InPlace& rows) const noexcept {
  return per_row_step ? steps_in_place(rows, *this)
                      : steps_in_place(rows, factors_at(*this, static_cast<double>(rows.step)));
}

}  // namespace shoal
