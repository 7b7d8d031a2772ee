#include "optim/rowwise_adagrad.h"

#include <algorithm>
#include <cmath>

#include "base/noise.h"

namespace shoal {

namespace {

// The sum of squares in eight interleaved partial sums, added in a fixed order: vector registers do this, and
// any other machine can reproduce it bit for bit.
SHOAL_INLINE double mean_square(std::size_t dim, float decay, const float* g, const float* w) noexcept {
  constexpr std::size_t kParts = 8;
  std::array<double, kParts> parts{};
  std::size_t e = 0;
  for (; e + kParts <= dim; e += kParts) {
    for (std::size_t k = 0; k < kParts; ++k) {
      const double h = static_cast<double>(g[e + k] + decay * w[e + k]);
      parts[k] += h * h;
    }
  }
  for (std::size_t k = 0; e < dim; ++e, ++k) {
    const double h = static_cast<double>(g[e] + decay * w[e]);
    parts[k] += h * h;
  }
  const double sum =
      ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
  return sum / static_cast<double>(dim);
}

struct Element {
  float kept;
  float k;

  SHOAL_INLINE void operator()(float g, std::uint32_t /*noise*/, std::array<float, 1>& w) const noexcept {
    w[0] = kept * w[0] - k * g;
  }
};

// Updates a row's m, and returns the step of its elements.
struct RowRule {
  RowWiseAdagrad rule;

  SHOAL_INLINE Element operator()(const float* g, const float* w, std::size_t dim, std::uint32_t noise,
                                  float& m) const noexcept {
    const float l2 = rule.decoupled ? 0.0F : rule.weight_decay;
    m = accumulate(m, mean_square(dim, l2, g, w), noise, 1);
    const float root = std::sqrt(m) + rule.eps;
    const float k = root == 0.0F ? 0.0F : rule.lr / root;
    return {.kept = 1.0F - (rule.decoupled ? rule.lr : k) * rule.weight_decay, .k = k};
  }
};

SHOAL_CLONES void steps(const RowWiseAdagrad& rule, const Block& block) noexcept {
  const RowRule row_rule{rule};
  const std::size_t dim = block.dim;
  for (std::size_t r = 0; r < block.rows; ++r) {
    const float* const g = block.grads + r * dim;
    float* const w = block.columns[0] + r * dim;
    const Element element = row_rule(g, w, dim, block.noise[r * dim], block.row_state[r]);
    for (std::size_t e = 0; e < dim; ++e) {
      std::array<float, 1> x{w[e]};
      element(g[e], 0, x);
      w[e] = x[0];
    }
  }
}

SHOAL_CLONES std::size_t steps_in_place(const InPlace& rows, const RowWiseAdagrad& rule) noexcept {
  return in_place::step<1, true>(rows, RowRule{rule});
}

}  // namespace

RowWiseAdagrad::RowWiseAdagrad(Params& params)
    : lr(static_cast<float>(params.positive("lr"))),
      eps(static_cast<float>(params.non_negative("eps"))),
      weight_decay(static_cast<float>(params.non_negative("weight_decay"))),
      decoupled(params.flag("decoupled")) {}

void RowWiseAdagrad::start(const Block& block) const noexcept {
  std::fill_n(block.row_state, block.rows, 0.0F);
}

void RowWiseAdagrad::step(const Block& block) const noexcept { steps(*this, block); }

std::size_t RowWiseAdagrad::step(const InPlace& rows) const noexcept { return steps_in_place(rows, *this); }

}  // namespace shoal
