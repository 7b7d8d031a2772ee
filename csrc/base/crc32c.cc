#include "base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#include "base/unaligned.h"
#include "base/units.h"

namespace shoal {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78U;  // reflected

// kTable[k][b]: the checksum of byte b followed by k zero bytes ("slicing by 8").
constexpr auto kTable = [] {
  std::array<std::array<std::uint32_t, 256>, 8> table{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? kPolynomial : 0U);
    }
    table[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) {
      table[k][b] = (table[k - 1][b] >> 8U) ^ table[0][table[k - 1][b] & 0xffU];
    }
  }
  return table;
}();

std::uint32_t by_byte(std::uint32_t crc, const std::byte* p, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    crc = (crc >> 8U) ^ kTable[0][(crc ^ std::to_integer<std::uint32_t>(p[i])) & 0xffU];
  }
  return crc;
}

// SHOAL_CRC marks functions that use the instruction; advanced() is the instruction: a checksum after 8 more
// bytes.
#if defined(__x86_64__)
#define SHOAL_CRC __attribute__((target("sse4.2,crc32")))

bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }

SHOAL_CRC inline std::uint64_t advanced(std::uint64_t crc, std::uint64_t word) noexcept {
  return _mm_crc32_u64(crc, word);
}
#elif defined(__aarch64__) && defined(__linux__)
#define SHOAL_CRC __attribute__((target("+crc")))

bool has_instruction() noexcept {
  constexpr unsigned long kCrc32 = 1UL << 7U;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & kCrc32) != 0;
}

SHOAL_CRC inline std::uint64_t advanced(std::uint64_t crc, std::uint64_t word) noexcept {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
#endif

#if defined(SHOAL_CRC)
// Three streams hide the instruction's latency of three cycles. Their checksums are combined by shifting over
// zeros, with a table (kShift[k][b]: byte k of a checksum shifted over kStream zero bytes).
constexpr std::size_t kStream = 1024;

constexpr auto kShift = [] {
  std::array<std::array<std::uint32_t, 256>, 4> shift{};
  std::array<std::uint32_t, 32> columns{};
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = std::uint32_t{1} << bit;
    for (std::size_t i = 0; i < kStream; ++i) {
      crc = (crc >> 8U) ^ kTable[0][crc & 0xffU];
    }
    columns[bit] = crc;
  }
  for (std::uint32_t k = 0; k < 4; ++k) {
    for (std::uint32_t b = 0; b < 256; ++b) {
      for (std::uint32_t bit = 0; bit < 8; ++bit) {
        shift[k][b] ^= ((b >> bit) & 1U) != 0 ? columns[8 * k + bit] : 0U;
      }
    }
  }
  return shift;
}();

std::uint32_t over_zeros(std::uint32_t crc) noexcept {
  return kShift[0][crc & 0xffU] ^ kShift[1][(crc >> 8U) & 0xffU] ^ kShift[2][(crc >> 16U) & 0xffU] ^
         kShift[3][crc >> 24U];
}

SHOAL_CRC std::uint32_t by_instruction(std::uint32_t crc, const std::byte* p, std::size_t n) noexcept {
  std::uint64_t a = crc;
  for (; n >= 3 * kStream; p += 3 * kStream, n -= 3 * kStream) {
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      a = advanced(a, load<std::uint64_t>(p + i));
      b = advanced(b, load<std::uint64_t>(p + kStream + i));
      c = advanced(c, load<std::uint64_t>(p + 2 * kStream + i));
    }
    a = over_zeros(over_zeros(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ c;
  }
  for (; n >= 8; p += 8, n -= 8) {
    a = advanced(a, load<std::uint64_t>(p));
  }
  return by_byte(static_cast<std::uint32_t>(a), p, n);
}
#endif

#if defined(__x86_64__)
// Folding (Gopal, Ozturk, Guilford et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel, 2009). Bytes are a polynomial over GF(2); the checksum depends only on its remainder.
// So the first 16 bytes, H x^64 + L, may be replaced by an equivalent d bits later, H (x^(64+d) mod P) + L
// (x^d mod P), which is added to the 16 bytes there. Sixteen such lanes advance in parallel, with d = 2048
// bits; the last 256 bytes have the checksum of the whole.
constexpr std::size_t kLanes = 256;         // bytes of all sixteen
constexpr std::size_t kFolds = 4 * kLanes;  // shorter inputs are faster without folding

// x^n mod P for a multiplication of reflected numbers, whose product is one bit too low.
constexpr std::uint64_t power(unsigned n) noexcept {
  std::uint32_t x = 0x80000000U;  // 1
  for (unsigned i = 0; i < n; ++i) {
    x = (x >> 1U) ^ ((x & 1U) != 0 ? kPolynomial : 0U);
  }
  return std::uint64_t{x} << 1U;
}

// The first 8 of 16 bytes are the upper half of the polynomial. (Both powers are 32 lower, because the
// product is shifted by its position in a 64-bit number.)
constexpr std::uint64_t kFirst = power(8 * kLanes + 32);
constexpr std::uint64_t kSecond = power(8 * kLanes - 32);

#define SHOAL_FOLDS __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2,crc32")))

bool has_folds() noexcept {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("vpclmulqdq") != 0 && __builtin_cpu_supports("pclmul") != 0;
}

SHOAL_FOLDS inline __m512i line_at(const std::byte* p) noexcept { return _mm512_loadu_si512(p); }

SHOAL_FOLDS inline __m512i folded(__m512i lanes, __m512i powers, __m512i onto) noexcept {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, powers, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, powers, 0x11), onto, kXorOfThree);
}

// Requires n >= kFolds bytes.
SHOAL_FOLDS std::uint32_t by_folding(std::uint32_t crc, const std::byte* p, std::size_t n) noexcept {
  const __m512i powers = _mm512_set4_epi64(static_cast<long long>(kSecond), static_cast<long long>(kFirst),
                                           static_cast<long long>(kSecond), static_cast<long long>(kFirst));
  const __m512i before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
  __m512i a = _mm512_xor_si512(line_at(p), before);
  __m512i b = line_at(p + 64);
  __m512i c = line_at(p + 128);
  __m512i d = line_at(p + 192);
  for (p += kLanes, n -= kLanes; n >= kLanes; p += kLanes, n -= kLanes) {
    a = folded(a, powers, line_at(p));
    b = folded(b, powers, line_at(p + 64));
    c = folded(c, powers, line_at(p + 128));
    d = folded(d, powers, line_at(p + 192));
  }
  alignas(64) std::array<std::byte, kLanes> rest;
  _mm512_store_si512(rest.data(), a);
  _mm512_store_si512(rest.data() + 64, b);
  _mm512_store_si512(rest.data() + 128, c);
  _mm512_store_si512(rest.data() + 192, d);
  return by_instruction(by_instruction(0, rest.data(), rest.size()), p, n);
}
#endif

using Checksum = std::uint32_t (*)(std::uint32_t crc, const std::byte* p, std::size_t n) noexcept;

std::uint32_t by_table(std::uint32_t crc, const std::byte* p, std::size_t n) noexcept {
  return ~crc32c_portable({p, n}, ~crc);
}

Checksum choose([[maybe_unused]] std::size_t bytes) noexcept {
#if defined(SHOAL_CRC)
  static const bool by_hardware = has_instruction();
  if (by_hardware) {
#if defined(__x86_64__)
    static const bool folds = has_folds();
    if (folds && bytes >= kFolds) {
      return by_folding;
    }
#endif
    return by_instruction;
  }
#endif
  return by_table;
}

}  // namespace

bool crc32c_has_instruction() noexcept {
#if defined(SHOAL_CRC)
  return has_instruction();
#else
  return false;
#endif
}

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  const std::byte* p = bytes.data();
  std::size_t n = bytes.size();
  for (; n >= 8; p += 8, n -= 8) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < 8; ++i) {  // little-endian on every machine
      word |= std::to_integer<std::uint64_t>(p[i]) << (8 * i);
    }
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      crc ^= kTable[7 - i][(word >> (8 * i)) & 0xffU];
    }
  }
  return ~by_byte(crc, p, n);
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return ~choose(bytes.size())(~before, bytes.data(), bytes.size());
}

std::uint32_t crc32c_copy(std::span<const std::byte> from, std::span<std::byte> to,
                          std::uint32_t before) noexcept {
  constexpr std::size_t kBlock = 16 * KiB;  // is still in the L1 cache when it is copied
  for (std::size_t at = 0; at < from.size(); at += kBlock) {
    const auto block = from.subspan(at, std::min(kBlock, from.size() - at));
    before = crc32c(block, before);
    std::memcpy(to.data() + at, block.data(), block.size());
  }
  return before;
}

}  // namespace shoal
