// FTRL-Proximal (McMahan et al., "Ad click prediction: a view from the trenches", KDD'13, Algorithm 1).
//
//   weight(z, n) = +0 if |z| <= l1, else -(z - sgn(z) * l1) / ((beta + sqrt(n)) / alpha + l2)
//   step(g):  w = weight(z, n);  n' = n + g^2;  sigma = (n' - n) / (alpha * (sqrt(n') + sqrt(n)));  z += g -
//             sigma * w
//
// A row is (z, n) per weight: w is derived when it is read, because a square root is cheaper than a cache
// miss. So a new alpha or l1 changes all weights at once. Both are accumulators and rounded stochastically;
// sigma uses n' as stored, so that its sum stays sqrt(n) / alpha regardless of how n was rounded.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Ftrl {
  static constexpr std::string_view kName = "FTRL";
  static constexpr std::array<std::string_view, 2> kColumns{"z", "n"};
  static constexpr bool kDerivesWeights = true;
  static constexpr bool kAddsUp = true;

  explicit Ftrl(Params& params);

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& block) const noexcept;
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;
  // w of every element of the block.
  void read(const Block& block, float* w) const noexcept;
  // Sets z so that the block reads w (up to rounding); n stays.
  void write(const Block& block, const float* w) const noexcept;
  // Sets z so that a block that reads `old` reads w, where the two differ; a weight that becomes 0 keeps the
  // largest |z| that a 0 can have (|z| <= l1).
  void move(const Block& block, const float* old, const float* w) const noexcept;

  float inverse_alpha;
  float beta;
  float l1;
  float l2;
  float n0;
};

}  // namespace shoal
