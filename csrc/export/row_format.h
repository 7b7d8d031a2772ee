// RowFormat: how an export stores a row of weights; written once, never changed.
//
//   float32             dim floats
//   float16, bfloat16   dim numbers of 16 bits, rounded to the nearest
//   int8, dim > 1       a scale (bfloat16), then dim integers from -127 to 127: weight = scale * integer
//   int8, dim 1         the integer; a line of rows shares one scale (export/index_line.h)
//
// The scale is max |w| / 127, rounded up to a bfloat16, so that no integer is cut off; a product of 8 and 7 bits is exact.
// A number beyond float16 becomes its largest, 65504.
//
// Removed. Weights are finite, and -128 is no integer of a weight: so a NaN, or -128, in place of the first weight says
// that the key has no row any more. Only deltas have such rows.
//
// Threads: immutable; any number of readers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/avx2.h"

namespace shoal {

class RowFormat {
 public:
  enum class Code : std::uint8_t { kFloat32, kFloat16, kBfloat16, kInt8 };
  static constexpr std::size_t kMaxInlineBytes = 4;

  // std::invalid_argument: no such dtype, or a dim that is not from 1 to 4096. `by_avx2`: how it is read, which changes no bit.
  RowFormat(std::string_view dtype, std::size_t dim, bool by_avx2 = has_avx2());

  using Decode = std::size_t (*)(std::span<const std::byte* const> rows, std::size_t dim, float* weights,
                                 std::uint16_t* missing) noexcept;

  Code code() const noexcept { return code_; }
  std::size_t dim() const noexcept { return dim_; }
  bool by_avx2() const noexcept { return by_avx2_; }
  // Of a row.
  std::size_t bytes() const noexcept { return bytes_; }
  // Narrow rows stand in the lines of the index, beside their hashes.
  bool is_inline() const noexcept { return bytes_ <= kMaxInlineBytes; }
  // A line of rows has one scale, which encode() and decode() are given.
  bool shares_scale() const noexcept { return code_ == Code::kInt8 && dim_ == 1; }

  // The scale of numbers that are no larger than `largest`.
  static float scale_for(float largest) noexcept;

  void encode(const float* weights, std::byte* row, float shared_scale = 0.0F) const noexcept;
  void encode_removed(std::byte* row) const noexcept;
  void decode(const std::byte* row, float* weights, float shared_scale = 0.0F) const noexcept;
  // Up to 65536 rows that do not share a scale: dim weights of each, of a null pointer nothing. Returns how many are null or
  // say `removed`; their places go to `missing`, which has room for all.
  std::size_t decode_rows(std::span<const std::byte* const> rows, float* weights,
                          std::uint16_t* missing) const noexcept {
    return decode_(rows, dim_, weights, missing);
  }
  bool is_removed(const std::byte* row) const noexcept;
  // Half the distance of the integers of an int8 row; 0 for other dtypes, whose steps are their numbers' own.
  float half_step(const std::byte* row, float shared_scale) const noexcept;

 private:
  Code code_;
  bool by_avx2_;
  std::size_t dim_;
  std::size_t bytes_;
  Decode decode_;
};

}  // namespace shoal
