// How values travel: as float32, or narrowed to 16 bits without bias, and with or without their zeros.
//
// Idea. Gradients and weights are float32 on both sides. Between them a number may lose the bits that its noise hides
// anyway (stochastic rounding: the mean is the number), and the zeros, of which sparse models are full, may become one
// bit each. Packing is exact to the bit: only +0.0, all bits clear, counts as a zero; -0.0 travels.
//
//   values       1.5  0  0  -2  0  7  0  0 | 3
//   map          00101001            00000001      one bit a value, the first in the lowest bit; the rest of the last byte 0
//   kept         1.5  -2  7  3
//
// The noise is a function of (seed, number of the message, hash, element), as in base/noise.h: a message that is sent
// again is the same message, and no generator is shared.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"

namespace shoal {

// What narrowing has changed, added up.
struct Loss {
  std::uint64_t values = 0;  // how many were narrowed
  double squared = 0;        // sum of (sent - given)^2; values that are not finite leave it alone
  double largest = 0;        // greatest |sent - given|
};

// One row of `dim` values for each hash. Throws std::invalid_argument where the sizes do not fit, or for kFloat32.
void narrow(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
            Dtype dtype, std::uint64_t seed, std::uint64_t message, std::span<std::uint16_t> out, Loss& loss);
void widen(std::span<const std::uint16_t> values, Dtype dtype, std::span<float> out) noexcept;

constexpr std::size_t map_bytes(std::uint64_t values) noexcept {
  return static_cast<std::size_t>((values + 7) / 8);
}

std::size_t count_nonzero(std::span<const float> values) noexcept;
std::size_t count_nonzero(std::span<const std::uint16_t> values) noexcept;
// `map` has map_bytes(values) bytes, `kept` the room of count_nonzero(values).
void pack(std::span<const float> values, std::span<std::byte> map, std::span<float> kept) noexcept;
void pack(std::span<const std::uint16_t> values, std::span<std::byte> map,
          std::span<std::uint16_t> kept) noexcept;

// How many values a map keeps.
std::size_t count_kept(std::span<const std::byte> map) noexcept;
// Clear bits behind the last value: a map that anybody may have sent.
bool is_map(std::span<const std::byte> map, std::uint64_t values) noexcept;
// The inverse of pack, for a map of which is_map() holds and kept.size() == count_kept(map).
void unpack(std::span<const std::byte> map, std::span<const float> kept, std::span<float> out) noexcept;
void unpack(std::span<const std::byte> map, std::span<const std::uint16_t> kept, Dtype dtype,
            std::span<float> out) noexcept;

}  // namespace shoal
