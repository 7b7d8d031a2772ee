// Compares all cells of a bucket with one hash: bit c of the result is set if cell c holds the hash.
//
// A bucket is one cache line that starts with its cells. The portable and the AVX2 version return the same bits; the
// version is chosen once per batch (base/simd.h explains why not by compiler flags).

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/avx2.h"
#include "base/simd.h"

namespace shoal {

struct PortableMatch {
  template <std::size_t kCells>
  static SHOAL_INLINE unsigned in(const std::byte* line, std::uint64_t wanted) noexcept {
    unsigned match = 0;
    for (std::size_t c = 0; c < kCells; ++c) {  // no branch: the matching cell is unpredictable
      std::uint64_t cell;
      std::memcpy(&cell, line + c * sizeof cell, sizeof cell);
      match |= static_cast<unsigned>(cell == wanted) << c;
    }
    return match;
  }
};

#if defined(__x86_64__)
struct Avx2Match {
  template <std::size_t kCells>
  SHOAL_AVX2 static inline unsigned in(const std::byte* line, std::uint64_t wanted) noexcept {
    const __m256i cells = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    const __m256i same = _mm256_cmpeq_epi64(cells, _mm256_set1_epi64x(static_cast<long long>(wanted)));
    auto match = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(same)));
    if constexpr (kCells < 4) {
      match &= (1U << kCells) - 1;  // the other lanes are payload
    } else if constexpr (kCells == 5) {
      std::uint64_t fifth;
      std::memcpy(&fifth, line + 4 * sizeof fifth, sizeof fifth);
      match |= static_cast<unsigned>(fifth == wanted) << 4U;
    }
    return match;
  }
};
#endif

}  // namespace shoal
