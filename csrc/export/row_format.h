// RowFormat: how an export stores a row of weights.
//
//   float32             dim floats
//   float16, bfloat16   dim numbers of 16 bits, rounded to nearest, ties to even
//   int8, dim > 1       a scale (bfloat16), then dim integers from -127 to 127: weight = scale * integer
//   int8, dim 1         the integer; the rows of a line share one scale (export/index_line.h)
//
// Symmetric linear quantization: the scale is max |w| / 127, rounded up to a bfloat16, so that no integer is
// clipped; the product of 8 and 7 bits is exact. A number beyond the range of float16 becomes the largest
// one, 65504.
//
// Removed rows. Weights are finite, and no weight is stored as -128: a NaN, or -128, in place of the first
// weight marks a key that no longer has a row. Only deltas contain such rows.
//
// Threads: immutable; any number of readers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/intrinsics.h"

namespace shoal {

class RowFormat {
 public:
  enum class Code : std::uint8_t { kFloat32, kFloat16, kBfloat16, kInt8 };
  static constexpr std::size_t kMaxInlineBytes = 4;

  // std::invalid_argument: an unknown dtype, or a dim outside 1 to 4096. `by_simd` selects the decoder, which
  // changes no bit.
  RowFormat(std::string_view dtype, std::size_t dim, bool by_simd = has_simd());

  using Decode = std::size_t (*)(std::span<const std::byte* const> rows, std::size_t dim, float* weights,
                                 std::uint16_t* removed) noexcept;

  Code code() const noexcept { return code_; }
  std::size_t dim() const noexcept { return dim_; }
  bool by_simd() const noexcept { return by_simd_; }
  // Bytes of one row.
  std::size_t bytes() const noexcept { return bytes_; }
  // Rows of at most kMaxInlineBytes are stored in the lines of the index, next to their hashes.
  bool is_inline() const noexcept { return bytes_ <= kMaxInlineBytes; }
  // The rows of a line share one scale, which encode() and decode() take as an argument.
  bool shares_scale() const noexcept { return code_ == Code::kInt8 && dim_ == 1; }

  // The scale for numbers of magnitude at most `largest`.
  static float scale_for(float largest) noexcept;

  void encode(const float* weights, std::byte* row, float shared_scale = 0.0F) const noexcept;
  void encode_removed(std::byte* row) const noexcept;
  void decode(const std::byte* row, float* weights, float shared_scale = 0.0F) const noexcept;
  // Decodes up to 65536 rows that do not share a scale, dim weights each. The positions of removed rows are
  // written to `removed`, which has room for all; returns how many there are.
  std::size_t decode_rows(std::span<const std::byte* const> rows, float* weights,
                          std::uint16_t* removed) const noexcept {
    return decode_(rows, dim_, weights, removed);
  }
  bool is_removed(const std::byte* row) const noexcept;
  // Half the quantization step of an int8 row; 0 for the other dtypes.
  float half_step(const std::byte* row, float shared_scale) const noexcept;

 private:
  Code code_;
  bool by_simd_;
  std::size_t dim_;
  std::size_t bytes_;
  Decode decode_;
};

}  // namespace shoal
