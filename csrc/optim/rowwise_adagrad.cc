#include "optim/rowwise_adagrad.h"

#include <algorithm>
#include <cmath>

#include "base/noise.h"

namespace shoal {

namespace {

// The sum of squares in eight interleaved parts, joined in one order: what a vector register does, and any other
// machine can repeat bit for bit.
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

SHOAL_CLONES void steps(const RowWiseAdagrad& rule, const Block& block) noexcept {
  const std::size_t dim = block.dim;
  const float l2 = rule.decoupled ? 0.0F : rule.weight_decay;
  for (std::size_t r = 0; r < block.rows; ++r) {
    const float* const g = block.grads + r * dim;
    float* const w = block.columns[0] + r * dim;
    float& m = block.row_state[r];
    m = accumulate(m, mean_square(dim, l2, g, w), block.noise[r * dim], 1);
    const float root = std::sqrt(m) + rule.eps;
    const float k = root == 0.0F ? 0.0F : rule.lr / root;
    const float kept = 1.0F - (rule.decoupled ? rule.lr : k) * rule.weight_decay;
    for (std::size_t e = 0; e < dim; ++e) {
      w[e] = kept * w[e] - k * g[e];
    }
  }
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

}  // namespace shoal
