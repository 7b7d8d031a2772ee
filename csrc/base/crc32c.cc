#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

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

#if defined(__x86_64__)
std::uint64_t load(const std::byte* p) noexcept {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Three streams hide the instruction's latency of three; their checksums are joined by shifting over zeros, which a
// table does (kShift[k][b]: byte k of a checksum moved over kStream zero bytes).
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

__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::uint32_t crc, const std::byte* p,
                                                               std::size_t n) noexcept {
  std::uint64_t a = crc;
  for (; n >= 3 * kStream; p += 3 * kStream, n -= 3 * kStream) {
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load(p + i));
      b = _mm_crc32_u64(b, load(p + kStream + i));
      c = _mm_crc32_u64(c, load(p + 2 * kStream + i));
    }
    a = over_zeros(over_zeros(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ c;
  }
  for (; n >= 8; p += 8, n -= 8) {
    a = _mm_crc32_u64(a, load(p));
  }
  return by_byte(static_cast<std::uint32_t>(a), p, n);
}
#endif

}  // namespace

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
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) {
    return ~by_instruction(~before, bytes.data(), bytes.size());
  }
#endif
  return crc32c_portable(bytes, before);
}

}  // namespace shoal
