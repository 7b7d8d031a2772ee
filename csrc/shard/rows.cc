#include "shard/rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/noise.h"
#include "optim/row_flags.h"

namespace shoal {

namespace {

constexpr std::uint32_t kWeightColumn = 7;  // a noise stream of its own for the weights

}  // namespace

Rows::Rows(std::size_t dim, Dtype dtype, const Optimizer& optimizer, const RowMetadata& metadata)
    : dim_(dim),
      dtype_(dtype),
      columns_(optimizer.columns().size()),
      has_row_state_(!optimizer.row_state().empty()),
      first_bytes_((dim * bytes_of(dtype) + 3) / 4 * 4),
      bytes_(first_bytes_ +
             ((columns_ - 1) * dim + (has_row_state_ ? 1 : 0) + metadata.columns()) * sizeof(float)),
      metadata_(metadata) {
  metadata_.place(bytes_ - metadata.columns() * sizeof(float));
  SHOAL_CHECK(dim >= 1 && dim <= kMaxDim,
              "dim must be from 1 to " + std::to_string(kMaxDim) + ", got " + std::to_string(dim));
  SHOAL_CHECK(dtype == Dtype::kFloat32 || dim >= 2,
              "16-bit weights need dim >= 2: at dim 1 they would save nothing");
  SHOAL_CHECK(
      dim == 2 || !optimizer.pairs(),
      "a row of this optimizer is a weight and its gradient: dim must be 2, got " + std::to_string(dim));
  SHOAL_CHECK(
      optimizer.elements() == Elements::kFloat32 || (dtype == Dtype::kFloat32 && dim % kInt64Floats == 0),
      "Add is for tables of int64, whose numbers take two floats: dim " + std::to_string(dim));
  SHOAL_CHECK(dtype == Dtype::kFloat32 || !optimizer.derives_weights(),
              "this optimizer keeps z and n, not weights, and both need float32: choose dtype float32, or an "
              "optimizer "
              "that stores weights");
}

std::size_t Rows::offset(std::size_t k) const noexcept {
  const std::size_t wide = std::min(k, columns_);  // columns before it
  return k == 0 ? 0 : first_bytes_ + ((wide - 1) * dim_ + (k - wide)) * sizeof(float);
}

std::size_t Rows::width(std::size_t k) const noexcept {
  return k == 0 ? dim_ * bytes_of(dtype_) : (k < columns_ ? dim_ : std::size_t{1}) * sizeof(float);
}

namespace {

// Copies rows of one float32 per column, without a loop over the columns.
template <std::size_t kNumbers>
void gather_narrow(std::span<std::byte* const> rows, const std::array<float*, Rows::kMaxNumbers>& numbers,
                   PrefetchCursor& ahead) noexcept {
  const std::array<float*, Rows::kMaxNumbers> to = numbers;  // a copy: the stores below cannot alias it
  PrefetchCursor cursor = ahead;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (r % 2 == 0) {
      cursor.next();
    }
    for (std::size_t k = 0; k < kNumbers; ++k) {
      std::memcpy(to[k] + r, rows[r] + k * sizeof(float), sizeof(float));
    }
  }
  ahead = cursor;
}

template <std::size_t kNumbers>
void scatter_narrow(const std::array<float*, Rows::kMaxNumbers>& numbers, std::span<const std::uint32_t> take,
                    std::span<std::byte* const> rows, PrefetchCursor& ahead) noexcept {
  PrefetchCursor cursor = ahead;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (r % 2 == 0) {
      cursor.next();
    }
    if (take[r] == 0) [[unlikely]] {
      continue;
    }
    std::array<float, kNumbers> row;
    for (std::size_t k = 0; k < kNumbers; ++k) {
      row[k] = numbers[k][r];
    }
    std::memcpy(rows[r], row.data(), sizeof row);
  }
  ahead = cursor;
}

}  // namespace

std::array<float*, Rows::kMaxNumbers> Rows::numbers(const Block& block) const noexcept {
  std::array<float*, kMaxNumbers> destinations{};
  std::copy_n(block.columns.begin(), columns_, destinations.begin());
  if (has_row_state_) {
    destinations[columns_] = block.row_state;
  }
  return destinations;
}

void Rows::widen(const std::byte* from, float* to) const noexcept {
  for (std::size_t e = 0; e < dim_; ++e) {
    std::uint16_t half;
    std::memcpy(&half, from + e * sizeof half, sizeof half);
    to[e] = dtype_ == Dtype::kFloat16 ? from_float16(half) : from_bfloat16(half);
  }
}

void Rows::read_weights(std::span<std::byte* const> rows, float* weights,
                        PrefetchCursor& ahead) const noexcept {
  if (dtype_ == Dtype::kFloat32 && dim_ == 1) {
    return gather_narrow<1>(rows, {weights}, ahead);
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    ahead.next();
    ahead.next_row();
    if (dtype_ == Dtype::kFloat32) {
      std::memcpy(weights + r * dim_, rows[r], dim_ * sizeof(float));
    } else {
      widen(rows[r], weights + r * dim_);
    }
  }
}

void Rows::gather(std::span<std::byte* const> rows, const Block& block,
                  PrefetchCursor& ahead) const noexcept {
  if (dim_ == 1) {
    switch (columns_ + (has_row_state_ ? 1 : 0)) {
      case 1:
        return gather_narrow<1>(rows, numbers(block), ahead);
      case 2:
        return gather_narrow<2>(rows, numbers(block), ahead);
      case 3:
        return gather_narrow<3>(rows, numbers(block), ahead);
      case 4:
        return gather_narrow<4>(rows, numbers(block), ahead);
      case 5:
        return gather_narrow<5>(rows, numbers(block), ahead);
      default:
        return gather_narrow<6>(rows, numbers(block), ahead);
    }
  }
  read_weights(rows, block.columns[0], ahead);
  for (std::size_t k = 1; k < columns_; ++k) {
    float* const column = block.columns[k];
    const std::size_t from = offset(k);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(column + r * dim_, rows[r] + from, dim_ * sizeof(float));
    }
  }
  if (has_row_state_) {
    const std::size_t from = offset(columns_);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(block.row_state + r, rows[r] + from, sizeof(float));
    }
  }
}

void Rows::scatter(const Block& block, std::span<const std::uint32_t> take, std::span<std::byte* const> rows,
                   PrefetchCursor& ahead) const noexcept {
  if (dim_ == 1) {
    switch (columns_ + (has_row_state_ ? 1 : 0)) {
      case 1:
        return scatter_narrow<1>(numbers(block), take, rows, ahead);
      case 2:
        return scatter_narrow<2>(numbers(block), take, rows, ahead);
      case 3:
        return scatter_narrow<3>(numbers(block), take, rows, ahead);
      case 4:
        return scatter_narrow<4>(numbers(block), take, rows, ahead);
      case 5:
        return scatter_narrow<5>(numbers(block), take, rows, ahead);
      default:
        return scatter_narrow<6>(numbers(block), take, rows, ahead);
    }
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (take[r] == 0) {
      continue;
    }
    ahead.next();
    std::byte* const row = rows[r];
    const float* const first = block.columns[0] + r * dim_;
    if (dtype_ == Dtype::kFloat32) {
      std::memcpy(row, first, dim_ * sizeof(float));
    } else {
      for (std::size_t e = 0; e < dim_; ++e) {
        const std::uint32_t bits =
            bits_for(block.noise[r * dim_ + e], kWeightColumn, std::bit_cast<std::uint32_t>(first[e]));
        const std::uint16_t half =
            dtype_ == Dtype::kFloat16 ? to_float16(first[e], bits) : to_bfloat16(first[e], bits);
        std::memcpy(row + e * sizeof half, &half, sizeof half);
      }
    }
    for (std::size_t k = 1; k < columns_; ++k) {
      std::memcpy(row + offset(k), block.columns[k] + r * dim_, dim_ * sizeof(float));
    }
    if (has_row_state_) {
      std::memcpy(row + offset(columns_), block.row_state + r, sizeof(float));
    }
  }
}

std::size_t Rows::scatter_finite(const Block& block, std::uint32_t* moves, std::uint32_t* finite,
                                 std::span<std::byte* const> rows, PrefetchCursor& ahead) const noexcept {
  for (std::size_t k = 0; k < columns_; ++k) {
    mark_finite(block.columns[k], block.rows, block.dim, finite);
  }
  if (has_row_state_) {
    mark_finite(block.row_state, block.rows, 1, finite);
  }
  std::size_t bad = 0;
  for (std::size_t r = 0; r < block.rows; ++r) {
    bad += moves[r] & (finite[r] ^ 1U);
    moves[r] &= finite[r];
  }
  scatter(block, {moves, block.rows}, rows, ahead);
  return bad;
}

}  // namespace shoal
