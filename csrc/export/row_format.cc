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

namespace shoal {

namespace {

constexpr std::size_t kScaleBytes = 2;

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
  return dim == 1 ? 1 : kScaleBytes + dim;
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

template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#if defined(__x86_64__)
using Eight = __m256;

SHOAL_SIMD inline void store(float* to, Eight numbers) noexcept { _mm256_storeu_ps(to, numbers); }
#elif defined(SHOAL_SIMD)
using Eight = float32x4x2_t;

inline void store(float* to, Eight numbers) noexcept {
  vst1q_f32(to, numbers.val[0]);
  vst1q_f32(to + 4, numbers.val[1]);
}

// Rows are aligned to bytes.
inline uint8x16_t load_16(const std::byte* from) noexcept {
  return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
}

// The halves of eight numbers of 16 bits, each with 32.
inline uint32x4_t low_half(uint16x8_t x) noexcept { return vmovl_u16(vget_low_u16(x)); }
inline uint32x4_t high_half(uint16x8_t x) noexcept { return vmovl_u16(vget_high_u16(x)); }
#endif

// Decoders: a number at a time, or eight by intrinsics, with the same bits; and the first number of a removed row.
struct Float32 {
  using Stored = float;
  static constexpr std::size_t kFirst = 0;  // bytes before the first
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint32_t>(row) & 0x7fffffffU) > 0x7f800000U;
  }
  SHOAL_INLINE explicit Float32(const std::byte*) noexcept {}
  SHOAL_INLINE float one(float x) const noexcept { return x; }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    return {{vreinterpretq_f32_u8(load_16(from)), vreinterpretq_f32_u8(load_16(from + 16))}};
  }
#endif
};

struct Float16 {
  using Stored = std::uint16_t;
  static constexpr std::size_t kFirst = 0;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint16_t>(row) & 0x7fffU) > 0x7c00U;
  }
  SHOAL_INLINE explicit Float16(const std::byte*) noexcept {}
  SHOAL_INLINE float one(std::uint16_t x) const noexcept { return from_float16(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {  // the same as base/half.h
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i size = _mm256_and_si256(x, _mm256_set1_epi32(0x7fff));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x8000)), 16);
    const __m256i beyond =
        _mm256_and_si256(_mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7bff)), _mm256_set1_epi32(0x7f800000));
    const __m256 mended =
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(size, 13)), _mm256_set1_ps(0x1p112F));
    return _mm256_or_ps(mended, _mm256_castsi256_ps(_mm256_or_si256(sign, beyond)));
  }
#elif defined(SHOAL_SIMD)
  // The same as base/half.h. The instruction for it changes some NaNs.
  static float32x4_t four(uint32x4_t x) noexcept {
    const uint32x4_t size = vandq_u32(x, vdupq_n_u32(0x7fff));
    const uint32x4_t sign = vshlq_n_u32(vandq_u32(x, vdupq_n_u32(0x8000)), 16);
    const uint32x4_t beyond = vandq_u32(vcgtq_u32(size, vdupq_n_u32(0x7bff)), vdupq_n_u32(0x7f800000));
    const float32x4_t mended = vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32(size, 13)), vdupq_n_f32(0x1p112F));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(mended), vorrq_u32(sign, beyond)));
  }
  Eight eight(const std::byte* from) const noexcept {
    const uint16x8_t x = vreinterpretq_u16_u8(load_16(from));
    return {{four(low_half(x)), four(high_half(x))}};
  }
#endif
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  static constexpr std::size_t kFirst = 0;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return (load<std::uint16_t>(row) & 0x7fffU) > 0x7f80U;
  }
  SHOAL_INLINE explicit Bfloat16(const std::byte*) noexcept {}
  SHOAL_INLINE float one(std::uint16_t x) const noexcept { return from_bfloat16(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    const uint16x8_t x = vreinterpretq_u16_u8(load_16(from));
    return {{vreinterpretq_f32_u32(vshlq_n_u32(low_half(x), 16)),
             vreinterpretq_f32_u32(vshlq_n_u32(high_half(x), 16))}};
  }
#endif
};

struct Int8 {
  using Stored = std::int8_t;
  static constexpr std::size_t kFirst = kScaleBytes;
  static SHOAL_INLINE bool is_removed(const std::byte* row) noexcept {
    return row[kFirst] == std::byte{0x80};
  }
  SHOAL_INLINE explicit Int8(const std::byte* row) noexcept
      : scale(from_bfloat16(load<std::uint16_t>(row))) {}
  SHOAL_INLINE float one(std::int8_t x) const noexcept { return scale * static_cast<float>(x); }
#if defined(__x86_64__)
  SHOAL_SIMD inline Eight eight(const std::byte* from) const noexcept {
    const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(x));
  }
#elif defined(SHOAL_SIMD)
  Eight eight(const std::byte* from) const noexcept {
    const int16x8_t x = vmovl_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(from)));
    const float32x4_t factor = vdupq_n_f32(scale);
    return {{vmulq_f32(factor, vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)))),
             vmulq_f32(factor, vcvtq_f32_s32(vmovl_s16(vget_high_s16(x))))}};
  }
#endif
  float scale;
};

using Pointers = std::span<const std::byte* const>;

// Calls widen(row, to) for each row that is present, and writes the positions of the others.
template <class Kind, class Use>
SHOAL_INLINE std::size_t each_row(Pointers rows, std::size_t dim, float* weights, std::uint16_t* missing,
                                  const Use& widen) noexcept {
  std::size_t count = 0;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    missing[count] = static_cast<std::uint16_t>(k);
    if (rows[k] == nullptr) [[unlikely]] {
      ++count;
      continue;
    }
    count += Kind::is_removed(rows[k]) ? 1U : 0U;
    widen(rows[k], weights + k * dim);
  }
  return count;
}

template <class Widen>
std::size_t widen_portably(Pointers rows, std::size_t dim, float* weights, std::uint16_t* missing) noexcept {
  using Stored = typename Widen::Stored;
  return each_row<Widen>(rows, dim, weights, missing, [dim](const std::byte* row, float* to) SHOAL_ALWAYS {
    const Widen widen(row);
    for (std::size_t e = 0; e < dim; ++e) {
      to[e] = widen.one(load<Stored>(row + Widen::kFirst + e * sizeof(Stored)));
    }
  });
}

#if defined(SHOAL_SIMD)
// kDim is dim, or 0 if dim is not one of the common ones.
template <class Widen, std::size_t kDim>
SHOAL_SIMD std::size_t widen_by_simd(Pointers rows, std::size_t dim, float* weights,
                                     std::uint16_t* missing) noexcept {
  using Stored = typename Widen::Stored;
  const std::size_t width = kDim == 0 ? dim : kDim;
  return each_row<Widen>(rows, width, weights, missing, [=](const std::byte* row, float* to) SHOAL_SIMD {
    const Widen widen(row);
    const std::byte* const from = row + Widen::kFirst;
    std::size_t e = 0;
    for (; e + 8 <= width; e += 8) {
      store(to + e, widen.eight(from + e * sizeof(Stored)));
    }
    for (; e < width; ++e) {
      to[e] = widen.one(load<Stored>(from + e * sizeof(Stored)));
    }
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
    row[kScaleBytes + e] = integer_of(weights[e], scale);
  }
}

void RowFormat::encode_removed(std::byte* row) const noexcept {
  std::memset(row, 0, bytes_);
  if (code_ == Code::kInt8) {
    row[dim_ == 1 ? 0 : kScaleBytes] = std::byte{0x80};
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
    std::uint16_t missing;
    decode_rows({&row, 1}, weights, &missing);
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
