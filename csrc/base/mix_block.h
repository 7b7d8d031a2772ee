// mix (base/mix.h) of many keys: a plain loop, compiled for the widest instructions of the machine.

#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mix.h"
#include "base/simd.h"

namespace shoal {

SHOAL_CLONES inline void mix_block(const std::uint64_t* keys, std::size_t n, std::uint64_t* hashes) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    hashes[i] = mix(keys[i]);
  }
}

SHOAL_CLONES inline void scramble_block(std::uint64_t* words, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    words[i] = scramble(words[i]);
  }
}

}  // namespace shoal
