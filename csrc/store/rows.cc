#include "store/rows.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/noise.h"

namespace shoal {

namespace {

constexpr std::uint32_t kWeightColumn =
    7;  // keeps the noise of a weight's rounding apart from the accumulators'

}  // namespace

Rows::Rows(std::size_t dim, Dtype dtype, const Optimizer& optimizer)
    : dim_(dim),
      dtype_(dtype),
      columns_(optimizer.columns().size()),
      has_row_state_(!optimizer.row_state().empty()),
      first_bytes_((dim * bytes_of(dtype) + 3) / 4 * 4),
      bytes_(first_bytes_ + ((columns_ - 1) * dim + (has_row_state_ ? 1 : 0)) * sizeof(float)) {
  SHOAL_CHECK(dim >= 1 && dim <= kWidest,
              "dim must be from 1 to " + std::to_string(kWidest) + ", got " + std::to_string(dim));
  SHOAL_CHECK(dtype == Dtype::kFloat32 || dim >= 2,
              "16-bit weights need dim >= 2: at dim 1 they would save nothing");
  SHOAL_CHECK(dtype == Dtype::kFloat32 || !optimizer.derives_weights(),
              "this optimizer keeps z and n, not weights, and both need float32: choose dtype float32, or an "
              "optimizer "
              "that stores weights");
}

std::size_t Rows::offset(std::size_t k) const noexcept {
  return k == 0 ? 0 : first_bytes_ + (k - 1) * dim_ * sizeof(float);
}

std::size_t Rows::width(std::size_t k) const noexcept {
  return k == 0 ? dim_ * bytes_of(dtype_) : (k < columns_ ? dim_ : std::size_t{1}) * sizeof(float);
}

void Rows::widen(const std::byte* from, float* to) const noexcept {
  for (std::size_t e = 0; e < dim_; ++e) {
    std::uint16_t half;
    std::memcpy(&half, from + e * sizeof half, sizeof half);
    to[e] = dtype_ == Dtype::kFloat16 ? from_float16(half) : from_bfloat16(half);
  }
}

void Rows::read_weights(std::span<std::byte* const> rows, float* weights) const noexcept {
  if (dtype_ != Dtype::kFloat32) {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      widen(rows[r], weights + r * dim_);
    }
  } else if (dim_ == 1) {  // a copy of a known size is one instruction
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(weights + r, rows[r], sizeof(float));
    }
  } else {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(weights + r * dim_, rows[r], dim_ * sizeof(float));
    }
  }
}

void Rows::gather(std::span<std::byte* const> rows, const Block& block) const noexcept {
  read_weights(rows, block.columns[0]);
  for (std::size_t k = 1; k < columns_; ++k) {
    float* const column = block.columns[k];
    const std::size_t from = offset(k);
    if (dim_ == 1) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        std::memcpy(column + r, rows[r] + from, sizeof(float));
      }
    } else {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        std::memcpy(column + r * dim_, rows[r] + from, dim_ * sizeof(float));
      }
    }
  }
  if (has_row_state_) {
    const std::size_t from = offset(columns_);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(block.row_state + r, rows[r] + from, sizeof(float));
    }
  }
}

void Rows::scatter(const Block& block, std::span<const std::uint32_t> take,
                   std::span<std::byte* const> rows) const noexcept {
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (take[r] == 0) {
      continue;
    }
    std::byte* const row = rows[r];
    if (dim_ == 1) {
      for (std::size_t k = 0; k < columns_; ++k) {
        std::memcpy(row + k * sizeof(float), block.columns[k] + r, sizeof(float));
      }
    } else {
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
    }
    if (has_row_state_) {
      std::memcpy(row + offset(columns_), block.row_state + r, sizeof(float));
    }
  }
}

}  // namespace shoal
