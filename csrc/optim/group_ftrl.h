// GroupFTRL: FTRL-Proximal with a sparse group lasso over the row (Yue et al., "Adaptive optimizers with
// sparse group lasso for neural networks in CTR prediction", ECML-PKDD'21):
//
//   s = clip(z, -l1, l1) - z;   t = l21 * sqrt(dim)
//   the row is 0 if |s| <= t, else w = s * (1 - t / |s|) / ((beta + sqrt(n)) / alpha + l2)
//
// z and n move as in FTRL. With l21 = 0 this is FTRL bit for bit; with dim 1 it is FTRL with l1 + l21.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct GroupFtrl {
  static constexpr std::string_view kName = "GroupFTRL";
  static constexpr std::array<std::string_view, 2> kColumns{"z", "n"};
  static constexpr bool kDerivesWeights = true;
  static constexpr bool kAddsUp = true;

  explicit GroupFtrl(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;
  void read(const Block& block, float* w) const noexcept;
  void write(const Block& block, const float* w) const noexcept;
  // Sets z so that a block that reads `old` reads w, where the two differ; a weight that becomes 0 keeps the
  // largest |z| that a 0 can have (|z| <= l1).
  void move(const Block& block, const float* old, const float* w) const noexcept;

  float inverse_alpha;
  float beta;
  float l1;
  float l2;
  float l21;
  float n0;
};

}  // namespace shoal
