#include "optim/group_ftrl.h"

#include <algorithm>
#include <cmath>

#include "optim/ftrl_weight.h"

namespace shoal {

namespace {

// 1 - t / |s|, or 0 if the whole row is 0; exactly 1 if l21 is 0.
float share_left(const GroupFtrl& rule, std::size_t dim, const float* z) noexcept {
  double squares = 0;
  for (std::size_t e = 0; e < dim; ++e) {
    const double s = static_cast<double>(shrink(z[e], rule.l1));
    squares += s * s;
  }
  const double norm = std::sqrt(squares);
  const double threshold = static_cast<double>(rule.l21) * std::sqrt(static_cast<double>(dim));
  return norm <= threshold ? 0.0F : static_cast<float>(1.0 - threshold / norm);
}

// One element's step; `share` is the fraction of the row that the group penalty leaves; x is (z, n).
struct Element {
  GroupFtrl rule;
  float share;

  SHOAL_INLINE void operator()(float g, std::uint32_t noise, std::array<float, 2>& x) const noexcept {
    auto& [z, n] = x;
    const float root = std::sqrt(n);
    const float w = divided(shrink(z, rule.l1) * share, stiffness(rule, root));
    advance(rule, g, w, root, noise, z, n);
  }
};

struct RowRule {
  GroupFtrl rule;

  SHOAL_INLINE Element operator()(const float*, const float* z, std::size_t dim, std::uint32_t,
                                  float&) const noexcept {
    return {rule, share_left(rule, dim, z)};
  }
};

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const GroupFtrl& rule) noexcept {
  return in_place::step<2>(rows, RowRule{rule});
}

// 1 + t / |pull|, the inverse of share_left: s = pull * raise gives the weights w of the row that begins at
// `first`.
float raise_of(const GroupFtrl& rule, const Block& block, std::size_t first, const float* w) noexcept {
  double squares = 0;
  for (std::size_t e = first; e < first + block.dim; ++e) {
    const double pull = static_cast<double>(w[e] * stiffness(rule, std::sqrt(block.columns[1][e])));
    squares += pull * pull;
  }
  const double threshold = static_cast<double>(rule.l21) * std::sqrt(static_cast<double>(block.dim));
  return squares == 0 ? 1.0F : static_cast<float>(1.0 + threshold / std::sqrt(squares));
}

}  // namespace

GroupFtrl::GroupFtrl(Params& params)
    : inverse_alpha(static_cast<float>(1.0 / params.positive("alpha"))),
      beta(static_cast<float>(params.non_negative("beta"))),
      l1(static_cast<float>(params.non_negative("l1"))),
      l2(static_cast<float>(params.non_negative("l2"))),
      l21(static_cast<float>(params.non_negative("l21"))),
      n0(static_cast<float>(params.non_negative("n0"))) {}

void GroupFtrl::start(const Block& block) const noexcept {
  std::fill_n(block.columns[1], block.size(), n0);
  write(block, block.columns[0]);
}

void GroupFtrl::step(const Block& block) const noexcept {
  for (std::size_t r = 0; r < block.rows; ++r) {
    const std::size_t first = r * block.dim;
    const float share = share_left(*this, block.dim, block.columns[0] + first);
    const Element element{*this, share};
    for (std::size_t e = first; e < first + block.dim; ++e) {
      std::array<float, 2> x{block.columns[0][e], block.columns[1][e]};
      element(block.grads[e], block.noise[e], x);
      block.columns[0][e] = x[0];
      block.columns[1][e] = x[1];
    }
  }
}

std::size_t GroupFtrl::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

void GroupFtrl::read(const Block& block, float* w) const noexcept {
  for (std::size_t r = 0; r < block.rows; ++r) {
    const std::size_t first = r * block.dim;
    const float share = share_left(*this, block.dim, block.columns[0] + first);
    for (std::size_t e = first; e < first + block.dim; ++e) {
      w[e] =
          divided(shrink(block.columns[0][e], l1) * share, stiffness(*this, std::sqrt(block.columns[1][e])));
    }
  }
}

void GroupFtrl::write(const Block& block, const float* w) const noexcept {
  for (std::size_t r = 0; r < block.rows; ++r) {
    const std::size_t first = r * block.dim;
    const float raise = raise_of(*this, block, first, w);
    for (std::size_t e = first; e < first + block.dim; ++e) {
      const float weight = w[e];  // may alias z
      const float pull = weight * stiffness(*this, std::sqrt(block.columns[1][e])) * raise;
      block.columns[0][e] = weight == 0.0F ? 0.0F : -pull - std::copysign(l1, weight);
    }
  }
}

void GroupFtrl::move(const Block& block, const float* old, const float* w) const noexcept {
  for (std::size_t r = 0; r < block.rows; ++r) {
    const std::size_t first = r * block.dim;
    const std::size_t end = first + block.dim;
    if (std::equal(w + first, w + end, old + first)) {
      continue;
    }
    // The weights of one row are coupled by its norm: unchanged ones may need a new z too.
    const float raise = raise_of(*this, block, first, w);
    for (std::size_t e = first; e < end; ++e) {
      float& z = block.columns[0][e];
      const float pull = w[e] * stiffness(*this, std::sqrt(block.columns[1][e])) * raise;
      z = w[e] == 0.0F ? std::clamp(z, -l1, l1) : -pull - std::copysign(l1, w[e]);
    }
  }
}

}  // namespace shoal
