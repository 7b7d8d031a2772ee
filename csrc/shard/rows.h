// Rows: conversion between a row as a table stores it (table/layout.h) and the columns of a Block
// (optim/block.h).
//
//   row   [ column 0: dim weights of the storage dtype, padded to 4 bytes | columns 1..: dim float32
//         | row state: float32 | row metadata: 4 bytes each (policy/lifecycle.h) ]
//
// Column 0 has 16-bit numbers only if it is w: FTRL's z is an accumulator and stays float32.
//
// Threads: immutable.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/half.h"
#include "base/prefetch.h"
#include "optim/block.h"
#include "optim/optimizer.h"
#include "policy/lifecycle.h"

namespace shoal {

class Rows {
 public:
  static constexpr std::size_t kMaxDim = 4096;
  static constexpr std::size_t kMaxNumbers = kMaxColumns + 1;  // of a row at dim 1

  Rows(std::size_t dim, Dtype dtype, const Optimizer& optimizer, const RowMetadata& metadata = {});

  std::size_t dim() const noexcept { return dim_; }
  Dtype dtype() const noexcept { return dtype_; }
  std::size_t columns() const noexcept { return columns_; }
  bool has_row_state() const noexcept { return has_row_state_; }
  std::size_t bytes() const noexcept { return bytes_; }

  const RowMetadata& metadata() const noexcept { return metadata_; }

  // Numbers of a whole row, its metadata left out: the columns, dim each, then the row state.
  std::size_t floats() const noexcept { return columns_ * dim_ + (has_row_state_ ? 1U : 0U); }

  // Number of stored columns, in the order of a checkpoint section: the columns, the row state, the row
  // metadata.
  std::size_t stored() const noexcept { return columns_ + (has_row_state_ ? 1U : 0U) + metadata_.columns(); }
  // Offset of stored column k in a row (the row state is number columns()), and its bytes without padding.
  std::size_t offset(std::size_t k) const noexcept;
  std::size_t width(std::size_t k) const noexcept;

  // Copies block.rows rows into the block's columns and back. `take` flags the rows to write. 16-bit weights
  // are rounded with the block's noise. Prefetches lines of `ahead` meanwhile.
  void gather(std::span<std::byte* const> rows, const Block& block, PrefetchCursor& ahead) const noexcept;
  void scatter(const Block& block, std::span<const std::uint32_t> take, std::span<std::byte* const> rows,
               PrefetchCursor& ahead) const noexcept;
  // Writes the rows of a block whose flags say that they change and are finite, and whose numbers are;
  // returns how many change but are not finite. Updates the flags (optim/row_flags.h).
  std::size_t scatter_finite(const Block& block, std::uint32_t* moves, std::uint32_t* finite,
                             std::span<std::byte* const> rows, PrefetchCursor& ahead) const noexcept;

  // Reads column 0 as float32, from rows that hold weights.
  void read_weights(std::span<std::byte* const> rows, float* weights, PrefetchCursor& ahead) const noexcept;

 private:
  void widen(const std::byte* from, float* to) const noexcept;
  // The destinations of a row's numbers at dim 1: columns, then the row state.
  std::array<float*, kMaxNumbers> numbers(const Block& block) const noexcept;

  std::size_t dim_;
  Dtype dtype_;
  std::size_t columns_;
  bool has_row_state_;
  std::size_t first_bytes_;  // column 0 with its padding
  std::size_t bytes_;
  RowMetadata metadata_;
};

}  // namespace shoal
