// with_dim: loops over rows whose length the compiler knows, for the usual dims.
//
//   with_dim<8, 16, 32, 64>(dim, [&](auto known) SHOAL_ALWAYS { ... });
//
// `known` is the dim as a constant where it is one of these, and 0 for all others. A copy of a known length is a few
// instructions, a sum over one needs no loop; each dim that is named is one more copy of the code.

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
