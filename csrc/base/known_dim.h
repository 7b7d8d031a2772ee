// with_dim: loops over rows whose length is known at compile time, for the usual dims.
//
//   with_dim<8, 16, 32, 64>(dim, [&](auto known) SHOAL_ALWAYS { ... });
//
// `known` is dim as a constant if dim is one of these, and 0 otherwise. A copy of known length is a few
// instructions, and a sum over one needs no loop; each named dim adds one instantiation.

#pragma once

#include <cstddef>
#include <type_traits>

#include "base/simd.h"

namespace shoal {

template <std::size_t kFirst, std::size_t... kRest, class Use>
SHOAL_INLINE auto with_dim(std::size_t dim, const Use& use) {
  if (dim == kFirst) {
    return use(std::integral_constant<std::size_t, kFirst>());
  }
  if constexpr (sizeof...(kRest) != 0) {
    return with_dim<kRest...>(dim, use);
  } else {
    return use(std::integral_constant<std::size_t, 0>());
  }
}

}  // namespace shoal
