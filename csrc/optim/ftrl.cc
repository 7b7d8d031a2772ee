#include "optim/ftrl.h"

#include <algorithm>

#include "optim/ftrl_weight.h"

namespace shoal {

namespace {

// One element's step; x is (z, n).
struct Element {
  Ftrl rule;

  SHOAL_INLINE void operator()(float g, std::uint32_t noise, std::array<float, 2>& x) const noexcept {
    auto& [z, n] = x;
    const float root = std::sqrt(n);
    const float w = divided(shrink(z, rule.l1), stiffness(rule, root));  // before n moves: the paper's w_t
    advance(rule, g, w, root, noise, z, n);
  }
};

SHOAL_CLONES void steps(std::size_t count, const Ftrl& parameters, const std::uint32_t* noise, const float* g,
                        float* z, float* n) noexcept {
  const Element element{parameters};  // a copy, which cannot alias z or n
  for (std::size_t e = 0; e < count; ++e) {
    std::array<float, 2> x{z[e], n[e]};
    element(g[e], noise[e], x);
    z[e] = x[0];
    n[e] = x[1];
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const Ftrl& rule) noexcept {
  return in_place::step<2>(rows, in_place::Alike<Element>{Element{rule}});
}

SHOAL_CLONES void weights(std::size_t count, const Ftrl& parameters, const float* z, const float* n,
                          float* w) noexcept {
  const Ftrl rule = parameters;
  for (std::size_t e = 0; e < count; ++e) {
    w[e] = divided(shrink(z[e], rule.l1), stiffness(rule, std::sqrt(n[e])));
  }
}

}  // namespace

Ftrl::Ftrl(Params& params)
    : inverse_alpha(static_cast<float>(1.0 / params.positive("alpha"))),
      beta(static_cast<float>(params.non_negative("beta"))),
      l1(static_cast<float>(params.non_negative("l1"))),
      l2(static_cast<float>(params.non_negative("l2"))),
      n0(static_cast<float>(params.non_negative("n0"))) {}

void Ftrl::start(const Block& block) const noexcept {
  std::fill_n(block.columns[1], block.size(), n0);
  write(block, block.columns[0]);
}

void Ftrl::step(const Block& block) const noexcept {
  steps(block.size(), *this, block.noise, block.grads, block.columns[0], block.columns[1]);
}

std::size_t Ftrl::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

void Ftrl::read(const Block& block, float* w) const noexcept {
  weights(block.size(), *this, block.columns[0], block.columns[1], w);
}

void Ftrl::write(const Block& block, const float* w) const noexcept {
  for (std::size_t e = 0; e < block.size(); ++e) {
    const float pull = w[e] * stiffness(*this, std::sqrt(block.columns[1][e]));
    block.columns[0][e] = w[e] == 0.0F ? 0.0F : -pull - std::copysign(l1, w[e]);
  }
}

void Ftrl::move(const Block& block, const float* old, const float* w) const noexcept {
  for (std::size_t e = 0; e < block.size(); ++e) {
    if (w[e] == old[e]) {
      continue;
    }
    float& z = block.columns[0][e];
    z = w[e] == 0.0F ? std::clamp(z, -l1, l1)
                     : -w[e] * stiffness(*this, std::sqrt(block.columns[1][e])) - std::copysign(l1, w[e]);
  }
}

}  // namespace shoal
