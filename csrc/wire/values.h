// Encoding of values: as float32, or narrowed to 16 bits without bias, and with or without their zeros.
//
// Algorithm. Gradients and weights are float32 at both ends. On the wire they may be narrowed by stochastic
// rounding, whose expectation is the number itself, and the zeros, which dominate in sparse models, may be
// replaced by a bitmap. Packing is lossless: only +0.0, all bits clear, counts as a zero; -0.0 is sent.
//
//   values       1.5  0  0  -2  0  7  0  0 | 3
//   map          00101001            00000001      a bit per value, the first in the lowest bit; others are 0
//   kept         1.5  -2  7  3
//
// The noise is a function of (seed, number of the message, hash, element), as in base/noise.h: a message that
// is sent again is identical, and no generator is shared.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"

namespace shoal {

// The accumulated errors of narrowing.
struct NarrowingErrors {
  std::uint64_t values = 0;  // the number of narrowed values
  double squared = 0;        // sum of (sent - original)^2 over finite values
  double largest = 0;        // the largest |sent - original|
};

// Narrows one row of `dim` values for each hash. std::invalid_argument if sizes do not match, or for
// kFloat32.
void narrow(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
            Dtype dtype, std::uint64_t seed, std::uint64_t message, std::span<std::uint16_t> out,
            NarrowingErrors& loss);
void widen(std::span<const std::uint16_t> values, Dtype dtype, std::span<float> out) noexcept;

constexpr std::size_t map_bytes(std::uint64_t values) noexcept {
  return static_cast<std::size_t>((values + 7) / 8);
}

std::size_t count_nonzero(std::span<const float> values) noexcept;
std::size_t count_nonzero(std::span<const std::uint16_t> values) noexcept;
// `map` has map_bytes(values.size()) bytes, `kept` has count_nonzero(values) elements.
void pack(std::span<const float> values, std::span<std::byte> map, std::span<float> kept) noexcept;
void pack(std::span<const std::uint16_t> values, std::span<std::byte> map,
          std::span<std::uint16_t> kept) noexcept;

// The number of bits that are set in a map.
std::size_t count_kept(std::span<const std::byte> map) noexcept;
// Whether the bits after the last value are 0, in an untrusted map.
bool is_map(std::span<const std::byte> map, std::uint64_t values) noexcept;
// The inverse of pack(); requires is_map() and kept.size() == count_kept(map).
void unpack(std::span<const std::byte> map, std::span<const float> kept, std::span<float> out) noexcept;
void unpack(std::span<const std::byte> map, std::span<const std::uint16_t> kept, Dtype dtype,
            std::span<float> out) noexcept;

}  // namespace shoal
