#include "optim/clip.h"

#include <algorithm>
#include <cmath>

namespace shoal {

void Clip::apply(const Block& block) const noexcept {
  for (std::size_t r = 0; r < block.rows; ++r) {
    float* const g = block.grads + r * block.dim;
    double squares = 0;
    for (std::size_t e = 0; e < block.dim; ++e) {
      g[e] = std::clamp(g[e], -value, value);
      squares += static_cast<double>(g[e]) * static_cast<double>(g[e]);
    }
    const double size = std::sqrt(squares);
    if (size > static_cast<double>(norm)) {
      const double factor = static_cast<double>(norm) / size;
      for (std::size_t e = 0; e < block.dim; ++e) {
        g[e] = static_cast<float>(static_cast<double>(g[e]) * factor);
      }
    }
  }
}

}  // namespace shoal
