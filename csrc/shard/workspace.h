// Workspace: the buffers with which one thread updates a run of rows, and simple loops over them. Internal to shard/.
//
//   block()           gradients, columns and row state of a run, and the noise for rounding
//   mark_moving       flags rows with a non-zero gradient element
//   mark_finite       flags rows whose elements are all finite
//   fill_noise        the noise of each element, from the step and the row's hash (base/noise.h)
//
// Threads: one owner.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/noise.h"
#include "base/simd.h"
#include "shard/shard.h"

namespace shoal {

inline constexpr std::size_t kBlockElements = 1024;

inline constexpr std::uint32_t kMagnitude = 0x7fffffffU;
inline constexpr std::uint32_t kExponent = 0x7f800000U;  // all ones: infinity or NaN

SHOAL_INLINE std::uint32_t is_finite(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kExponent) != kExponent);
}

SHOAL_INLINE std::uint32_t is_nonzero(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kMagnitude) != 0);
}

// Sets moves[r] if some element of row r is not zero.
SHOAL_CLONES inline void mark_moving(const float* x, std::size_t rows, std::size_t dim,
                                     std::uint32_t* moves) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      moves[r] = is_nonzero(x[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    std::uint32_t any = 0;
    for (std::size_t e = 0; e < dim; ++e) {
      any |= is_nonzero(x[r * dim + e]);
    }
    moves[r] = any;
  }
}

// Clears finite[r] unless all elements of row r are finite.
SHOAL_CLONES inline void mark_finite(const float* x, std::size_t rows, std::size_t dim,
                                     std::uint32_t* finite) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      finite[r] &= is_finite(x[r]);
    }
    return;
  }
  // Nearly always all rows are finite; one flat loop establishes that much faster than a loop per row.
  std::uint32_t all = 1;
  for (std::size_t i = 0; i < rows * dim; ++i) {
    all &= is_finite(x[i]);
  }
  if (all != 0) {
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    all = 1;
    for (std::size_t e = 0; e < dim; ++e) {
      all &= is_finite(x[r * dim + e]);
    }
    finite[r] &= all;
  }
}

SHOAL_CLONES inline void fill_noise(std::span<const std::uint64_t> hashes, std::size_t dim,
                                    std::uint64_t shared, std::uint32_t* noise) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < hashes.size(); ++r) {
      noise[r] = row_noise(shared, hashes[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    const std::uint32_t row = row_noise(shared, hashes[r]);
    for (std::size_t e = 0; e < dim; ++e) {
      noise[r * dim + e] = element_noise(row, static_cast<std::uint32_t>(e));
    }
  }
}

// The buffers of one part of a batch: gradients, columns, row state, noise, flags and initial rows.
struct Shard::Workspace {
  // In this memory; null: it has its own.
  explicit Workspace(const Rows& rows, Buffer<std::byte>* room = nullptr)
      : most(std::clamp<std::size_t>(kBlockElements / rows.dim(), 1, Probe::kMax)),
        elements(most * rows.dim()) {
    const std::array<std::size_t, 4> sizes{sizeof(float) * (elements * (kMaxColumns + 1) + most),
                                           sizeof(std::uint32_t) * elements, sizeof(std::uint32_t) * 2 * most,
                                           most * rows.bytes()};
    std::size_t size = 0;
    for (const std::size_t bytes : sizes) {
      size += aligned(bytes);
    }
    std::byte* at = (room == nullptr ? own : *room).claim(size).data();
    floats = reinterpret_cast<float*>(at);
    noise = reinterpret_cast<std::uint32_t*>(at += aligned(sizes[0]));
    flags = reinterpret_cast<std::uint32_t*>(at += aligned(sizes[1]));
    fresh = at + aligned(sizes[2]);
  }

  // A block of `count` rows with writable arrays.
  Block block(std::size_t count, std::size_t dim) noexcept {
    float* const at = floats;
    return {.rows = count,
            .dim = dim,
            .grads = at,
            .columns = {at + elements, at + 2 * elements, at + 3 * elements, at + 4 * elements,
                        at + 5 * elements},
            .row_state = at + (kMaxColumns + 1) * elements,
            .noise = noise,
            .step = 0};
  }
  std::uint32_t* moves() noexcept { return flags; }
  std::uint32_t* finite() noexcept { return flags + most; }

  std::size_t most;
  std::size_t elements;
  float* floats;
  std::uint32_t* noise;
  std::uint32_t* flags;
  std::byte* fresh;

 private:
  static constexpr std::size_t aligned(std::size_t bytes) noexcept {
    return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  Buffer<std::byte> own;
};

}  // namespace shoal
