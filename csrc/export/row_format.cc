#include "export/row_format.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/half.h"
#include "base/intrinsics.h"
#include "base/known_dim.h"
#include "base/simd.h"
#include "base/unaligned.h"
#include "export/widen.h"

namespace shoal {

namespace {

RowFormat::Code code_of(std::string_view dtype) {
  SHOAL_CHECK(dtype == "float32" || dtype == "float16" || dtype == "bfloat16" || dtype == "int8",
              "no dtype " + std::string(dtype) + " of an export: float32, float16, bfloat16 or int8");
  return dtype == "float32"
             ? RowFormat::Code::kFloat32
             : (dtype == "float16"
                    ? RowFormat::Code::kFloat16
                    : (dtype == "bfloat16" ? RowFormat::Code::kBfloat16 : RowFormat::Code::kInt8));
}

std::size_t row_bytes(RowFormat::Code code, std::size_t dim) noexcept {
  switch (code) {
    case RowFormat::Code::kFloat32:
      return 4 * dim;
    case RowFormat::Code::kFloat16:
    case RowFormat::Code::kBfloat16:
      return 2 * dim;
    case RowFormat::Code::kInt8:
      break;
  }
  return dim == 1 ? 1 : widen::kScaleBytes + dim;
}

// The noise that makes stochastic rounding (base/half.h) round to nearest, ties to even.
std::uint16_t nearest_bfloat16(float x) noexcept {
  return to_bfloat16(x, 0x7fffU + ((std::bit_cast<std::uint32_t>(x) >> 16U) & 1U));
}

std::uint16_t nearest_float16(float x) noexcept {
  const std::uint32_t size = std::bit_cast<std::uint32_t>(x) & 0x7fffffffU;
  if (size < 0x38800000U) {  // below 2^-14, in steps of 2^-24: a tie goes up where the number below is odd
    const auto below = static_cast<std::uint32_t>(std::bit_cast<float>(size) * 0x1p24F);
    return to_float16(x, (below & 1U) != 0 ? 0x7fffff00U : 0x80000000U);
  }
  return to_float16(x, 0xfffU + ((size >> 13U) & 1U));
}

using widen::Bfloat16;
using widen::Float16;
using widen::Float32;
using widen::Int8;

using Pointers = std::span<const std::byte* const>;

// Calls widen(row, to) for each row, and writes the positions of those that are marked as removed.
template <class Kind, class Use>
SHOAL_INLINE std::size_t each_row(Pointers rows, std::size_t dim, float* weights, std::uint16_t* removed,
                                  const Use& widen) noexcept {
  std::size_t count = 0;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    removed[count] = static_cast<std::uint16_t>(k);
    count += Kind::is_removed(rows[k]) ? 1U : 0U;
    widen(rows[k], weights + k * dim);
  }
  return count;
}

template <class Widen>
std::size_t widen_portably(Pointers rows, std::size_t dim, float* weights, std::uint16_t* removed) noexcept {
  using Stored = typename Widen::Stored;
  return each_row<Widen>(rows, dim, weights, removed, [dim](const std::byte* row, float* to) SHOAL_ALWAYS {
    const Widen widen(row);
    for (std::size_t e = 0; e < dim; ++e) {
      to[e] = widen.scalar(load<Stored>(row + Widen::kFirst + e * sizeof(Stored)));
    }
  });
}

#if defined(SHOAL_SIMD)
// kDim is dim, or 0 if dim is not one of the common ones.
template <class Widen, std::size_t kDim>
SHOAL_SIMD std::size_t widen_by_simd(Pointers rows, std::size_t dim, float* weights,
                                     std::uint16_t* removed) noexcept {
  const std::size_t width = kDim == 0 ? dim : kDim;
  return each_row<Widen>(rows, width, weights, removed, [=](const std::byte* row, float* to) SHOAL_SIMD {
    widen::row_by_simd<Widen>(row, width, to);
  });
}
#endif

template <class Widen>
RowFormat::Decode choose([[maybe_unused]] std::size_t dim, [[maybe_unused]] bool by_simd) noexcept {
#if defined(SHOAL_SIMD)
  if (by_simd) {
    return with_dim<8, 16, 32, 64>(
        dim, [](auto known) -> RowFormat::Decode { return &widen_by_simd<Widen, known>; });
  }
#endif
  return &widen_portably<Widen>;
}

RowFormat::Decode decode_of(RowFormat::Code code, std::size_t dim, bool by_simd) noexcept {
  switch (code) {
    case RowFormat::Code::kFloat32:
      break;
    case RowFormat::Code::kFloat16:
      return choose<Float16>(dim, by_simd);
    case RowFormat::Code::kBfloat16:
      return choose<Bfloat16>(dim, by_simd);
    case RowFormat::Code::kInt8:
      return choose<Int8>(dim, by_simd);
  }
  return choose<Float32>(dim, by_simd);
}

std::byte integer_of(float x, float scale) noexcept {
  if (scale == 0.0F) {
    return std::byte{0};
  }
  const float q = std::nearbyint(x / scale);
  return static_cast<std::byte>(static_cast<std::int8_t>(q < -127.0F ? -127.0F : (q > 127.0F ? 127.0F : q)));
}

}  // namespace

RowFormat::RowFormat(std::string_view dtype, std::size_t dim, bool by_simd)
    : code_(code_of(dtype)),
      by_simd_(by_simd),
      dim_(dim),
      bytes_(row_bytes(code_, dim)),
      decode_(decode_of(code_, dim, by_simd)) {
  SHOAL_CHECK(dim >= 1 && dim <= 4096, "dim must be from 1 to 4096, got " + std::to_string(dim));
}

float RowFormat::scale_for(float largest) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(largest / 127.0F);
  return std::bit_cast<float>((bits + 0xffffU) & 0xffff0000U);
}

void RowFormat::encode(const float* weights, std::byte* row, float shared_scale) const noexcept {
  switch (code_) {
    case Code::kFloat32:
      std::memcpy(row, weights, bytes_);
      return;
    case Code::kFloat16:
    case Code::kBfloat16:
      for (std::size_t e = 0; e < dim_; ++e) {
        const std::uint16_t bits =
            code_ == Code::kFloat16 ? nearest_float16(weights[e]) : nearest_bfloat16(weights[e]);
        std::memcpy(row + 2 * e, &bits, sizeof bits);
      }
      return;
    case Code::kInt8:
      break;
  }
  if (dim_ == 1) {
    row[0] = integer_of(weights[0], shared_scale);
    return;
  }
  float largest = 0.0F;
  for (std::size_t e = 0; e < dim_; ++e) {
    largest = std::max(largest, std::abs(weights[e]));
  }
  const float scale = scale_for(largest);
  const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scale) >> 16U);
  std::memcpy(row, &bits, sizeof bits);
  for (std::size_t e = 0; e < dim_; ++e) {
    row[widen::kScaleBytes + e] = integer_of(weights[e], scale);
  }
}

void RowFormat::encode_removed(std::byte* row) const noexcept {
  std::memset(row, 0, bytes_);
  if (code_ == Code::kInt8) {
    row[dim_ == 1 ? 0 : widen::kScaleBytes] = std::byte{0x80};
  } else if (code_ == Code::kFloat32) {
    const std::uint32_t nan = 0x7fc00000U;
    std::memcpy(row, &nan, sizeof nan);
  } else {
    const std::uint16_t nan = code_ == Code::kFloat16 ? 0x7e00U : 0x7fc0U;
    std::memcpy(row, &nan, sizeof nan);
  }
}

void RowFormat::decode(const std::byte* row, float* weights, float shared_scale) const noexcept {
  if (shares_scale()) {
    weights[0] = shared_scale * static_cast<float>(load<std::int8_t>(row));
  } else {
    std::uint16_t removed;
    decode_rows({&row, 1}, weights, &removed);
  }
}

bool RowFormat::is_removed(const std::byte* row) const noexcept {
  switch (code_) {
    case Code::kFloat32:
      return Float32::is_removed(row);
    case Code::kFloat16:
      return Float16::is_removed(row);
    case Code::kBfloat16:
      return Bfloat16::is_removed(row);
    case Code::kInt8:
      break;
  }
  return dim_ == 1 ? row[0] == std::byte{0x80} : Int8::is_removed(row);
}

float RowFormat::half_step(const std::byte* row, float shared_scale) const noexcept {
  if (code_ != Code::kInt8) {
    return 0.0F;
  }
  return 0.5F * (dim_ == 1 ? shared_scale : from_bfloat16(load<std::uint16_t>(row)));
}

}  // namespace shoal
