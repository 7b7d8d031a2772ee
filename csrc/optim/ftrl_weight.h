// Shared by FTRL and GroupFTRL: the parts of the proximal map, one element at a time.

#pragma once

#include <cmath>

#include "base/noise.h"

namespace shoal {

// (beta + sqrt(n)) / alpha + l2
template <class Rule>
SHOAL_INLINE float stiffness(const Rule& rule, float root_n) noexcept {
  return (rule.beta + root_n) * rule.inverse_alpha + rule.l2;
}

// -(z - sgn(z) * l1) if |z| > l1, else +0: the soft threshold.
SHOAL_INLINE float shrink(float z, float l1) noexcept {
  return std::abs(z) <= l1 ? 0.0F : std::copysign(l1, z) - z;
}

SHOAL_INLINE float divided(float pull, float stiffness) noexcept {
  return pull == 0.0F || stiffness == 0.0F ? 0.0F : pull / stiffness;
}

// z and n after a gradient g at the weight w.
template <class Rule>
SHOAL_INLINE void advance(const Rule& rule, float g, float w, float root_n, std::uint32_t noise, float& z,
                          float& n) noexcept {
  const double slope = static_cast<double>(g);
  const float next = accumulate(n, slope * slope, noise, 1);
  // The paper's (sqrt(next) - sqrt(n)) / alpha cancels once g*g << n; this does not.
  const float roots = std::sqrt(next) + root_n;
  const float sigma = next == n ? 0.0F : (next - n) * rule.inverse_alpha / roots;
  z = accumulate(z, slope - static_cast<double>(sigma) * static_cast<double>(w), noise, 0);
  n = next;
}

}  // namespace shoal
