// Compares all cells of a bucket with one hash: bit c of the result is set if cell c holds the hash. The bits
// `but` of a cell, which are ones in the hash, may be zeros (PassedBits).
//
// A bucket is one cache line that starts with its cells. The portable version and the one with intrinsics
// return the same bits; the version is chosen once per batch (base/simd.h explains why not by compiler
// flags).

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/intrinsics.h"
#include "base/simd.h"

namespace shoal {

struct PortableMatch {
  template <std::size_t kCells>
  static SHOAL_INLINE unsigned in(const std::byte* line, std::uint64_t wanted, std::uint64_t but) noexcept {
    unsigned match = 0;
    for (std::size_t c = 0; c < kCells; ++c) {  // no branch: the matching cell is unpredictable
      std::uint64_t cell;
      std::memcpy(&cell, line + c * sizeof cell, sizeof cell);
      match |= static_cast<unsigned>((cell | but) == wanted) << c;
    }
    return match;
  }
};

#if defined(SHOAL_SIMD)
struct SimdMatch {
  template <std::size_t kCells>
  SHOAL_SIMD static inline unsigned in(const std::byte* line, std::uint64_t wanted,
                                       std::uint64_t but) noexcept {
#if defined(__x86_64__)
    const __m256i cells = _mm256_or_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)),
                                          _mm256_set1_epi64x(static_cast<long long>(but)));
    const __m256i same = _mm256_cmpeq_epi64(cells, _mm256_set1_epi64x(static_cast<long long>(wanted)));
    auto match = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(same)));
    if constexpr (kCells < 4) {
      match &= (1U << kCells) - 1;  // the other lanes are payload
    }
#else
    // The bit of each lane; those that are payload have none.
    static constexpr std::array<std::uint32_t, 4> kBits{1, 2, kCells > 2 ? 4 : 0, kCells > 3 ? 8 : 0};
    const auto* const at = reinterpret_cast<const std::uint8_t*>(line);
    const uint64x2_t cell = vdupq_n_u64(wanted);
    const uint64x2_t zeros = vdupq_n_u64(but);
    const uint32x2_t first = vmovn_u64(vceqq_u64(vorrq_u64(vreinterpretq_u64_u8(vld1q_u8(at)), zeros), cell));
    const uint32x2_t second =
        vmovn_u64(vceqq_u64(vorrq_u64(vreinterpretq_u64_u8(vld1q_u8(at + 16)), zeros), cell));
    unsigned match = vaddvq_u32(vandq_u32(vcombine_u32(first, second), vld1q_u32(kBits.data())));
#endif
    if constexpr (kCells == 5) {
      std::uint64_t fifth;
      std::memcpy(&fifth, line + 4 * sizeof fifth, sizeof fifth);
      match |= static_cast<unsigned>((fifth | but) == wanted) << 4U;
    }
    return match;
  }
};
#endif

}  // namespace shoal
