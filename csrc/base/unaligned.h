// Numbers at any address: load and store compile to one instruction; a cast of the pointer would be
// undefined.

#pragma once

#include <cstddef>
#include <cstring>

#include "base/simd.h"

namespace shoal {

template <class T>
SHOAL_INLINE T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
SHOAL_INLINE void store(std::byte* at, T value) noexcept {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace shoal
