// Workspace: the buffers with which one thread updates a run of rows. Internal to shard/.
//
//   block()           gradients, columns and row state of a run, and the noise for rounding
//                     (optim/row_flags.h)
//
// Threads: one owner.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "optim/row_flags.h"
#include "shard/rows.h"
#include "shard/table_spec.h"
#include "table/probe.h"

namespace shoal {

inline constexpr std::size_t kBlockElements = 1024;

// The buffers of one part of a batch: gradients, columns, row state, noise, flags and initial rows.
struct Workspace {
  // In this memory; null: it has its own.
  explicit Workspace(const Rows& rows, ShardScratch* scratch = nullptr)
      : max_rows(std::clamp<std::size_t>(kBlockElements / rows.dim(), 1, Probe::kMax)),
        elements(max_rows * rows.dim()) {
    const std::array<std::size_t, 4> sizes{sizeof(float) * (elements * (kMaxColumns + 1) + max_rows),
                                           sizeof(std::uint32_t) * elements,
                                           sizeof(std::uint32_t) * 2 * max_rows, max_rows * rows.bytes()};
    std::size_t size = 0;
    for (const std::size_t bytes : sizes) {
      size += aligned(bytes);
    }
    std::byte* at = (scratch == nullptr ? own : scratch->bytes_).claim(size).data();
    floats = reinterpret_cast<float*>(at);
    noise = reinterpret_cast<std::uint32_t*>(at += aligned(sizes[0]));
    flags = reinterpret_cast<std::uint32_t*>(at += aligned(sizes[1]));
    initial = at + aligned(sizes[2]);
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
  std::uint32_t* finite() noexcept { return flags + max_rows; }

  std::size_t max_rows;
  std::size_t elements;
  float* floats;
  std::uint32_t* noise;
  std::uint32_t* flags;
  std::byte* initial;

 private:
  static constexpr std::size_t aligned(std::size_t bytes) noexcept {
    return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  Buffer<std::byte> own;
};

}  // namespace shoal
