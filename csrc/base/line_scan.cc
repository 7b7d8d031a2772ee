#include "base/line_scan.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/intrinsics.h"
#include "base/simd.h"

namespace shoal {

namespace {

constexpr std::size_t kBlock = 64;  // bytes of which one mask is made
constexpr std::uint8_t kNewline = 10;

// The bits that are set in a byte: their numbers, ascending, and how many there are.
constexpr auto kBits = [] {
  struct {
    std::array<std::array<std::uint16_t, 8>, 256> numbers;
    std::array<std::uint8_t, 256> count;
  } bits{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    for (std::size_t bit = 0; bit < 8; ++bit) {
      if ((byte >> bit & 1U) != 0) {
        bits.numbers[byte][bits.count[byte]++] = static_cast<std::uint16_t>(bit);
      }
    }
  }
  return bits;
}();

struct Masks {
  std::uint64_t stops;  // bit i: byte i is the separator or a newline
  std::uint64_t newlines;
};

// Bit i of the result: byte i of the word is zero. Exact: no carry passes from one byte to the next.
inline std::uint64_t zero_bytes(std::uint64_t word) noexcept {
  constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7fU;
  const std::uint64_t zeros = ~(((word & kLow) + kLow) | word | kLow) >> 7U;
  return (zeros * 0x0102040810204080U) >> 56U;
}

// Writes `from` plus the number of each set bit, and up to kSlack more numbers; returns the end. Eight bits
// at a time without a branch: one for each bit would often be mispredicted.
SHOAL_INLINE std::uint16_t* put_by_table(std::uint64_t bits, std::size_t from, std::uint16_t* to) noexcept {
  for (std::size_t i = 0; i < kBlock; i += 8) {
    const std::size_t byte = bits >> i & 0xffU;
    const auto numbers = kBits.numbers[byte];
    for (std::size_t j = 0; j < 8; ++j) {
      to[j] = static_cast<std::uint16_t>(from + i + numbers[j]);
    }
    to += kBits.count[byte];
  }
  return to;
}

struct Portable {
  static Masks of(const std::uint8_t* block, std::uint8_t separator) noexcept {
    constexpr std::uint64_t kOnes = 0x0101010101010101U;
    Masks found{0, 0};
    for (std::size_t i = 0; i < kBlock; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, block + i, sizeof word);
      found.newlines |= zero_bytes(word ^ (kOnes * kNewline)) << i;
      found.stops |= zero_bytes(word ^ (kOnes * separator)) << i;
    }
    found.stops |= found.newlines;
    return found;
  }
  static std::uint16_t* put(std::uint64_t bits, std::size_t from, std::uint16_t* to) noexcept {
    return put_by_table(bits, from, to);
  }
};

#if defined(__x86_64__)
struct Simd {
  SHOAL_SIMD static inline Masks of(const std::uint8_t* block, std::uint8_t separator) noexcept {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32));
    const auto equal = [&](std::uint8_t byte) SHOAL_SIMD {
      const __m256i sought = _mm256_set1_epi8(static_cast<char>(byte));
      const int first = _mm256_movemask_epi8(_mm256_cmpeq_epi8(low, sought));
      const int second = _mm256_movemask_epi8(_mm256_cmpeq_epi8(high, sought));
      return static_cast<std::uint64_t>(static_cast<std::uint32_t>(first)) |
             static_cast<std::uint64_t>(static_cast<std::uint32_t>(second)) << 32U;
    };
    const std::uint64_t newlines = equal(kNewline);
    return {equal(separator) | newlines, newlines};
  }
  SHOAL_SIMD static inline std::uint16_t* put(std::uint64_t bits, std::size_t from,
                                              std::uint16_t* to) noexcept {
    return put_by_table(bits, from, to);
  }
};

// Ice Lake, Zen 4 and later: one instruction gathers the numbers of all 64 bits.
#define SHOAL_COMPRESS __attribute__((target("avx512f,avx512bw,avx512vbmi2,bmi,popcnt")))

bool has_compress() noexcept {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vbmi2") != 0 && __builtin_cpu_supports("bmi") != 0;
}

constexpr auto kNumbers = [] {
  std::array<std::uint8_t, kBlock> numbers{};
  for (std::size_t i = 0; i < kBlock; ++i) {
    numbers[i] = static_cast<std::uint8_t>(i);
  }
  return numbers;
}();

struct Compress {
  SHOAL_COMPRESS static inline Masks of(const std::uint8_t* block, std::uint8_t separator) noexcept {
    const __m512i bytes = _mm512_loadu_si512(block);
    const std::uint64_t newlines = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(kNewline));
    const std::uint64_t separators =
        _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(separator)));
    return {separators | newlines, newlines};
  }
  SHOAL_COMPRESS static inline std::uint16_t* put(std::uint64_t bits, std::size_t from,
                                                  std::uint16_t* to) noexcept {
    const __m512i base = _mm512_set1_epi16(static_cast<short>(from));
    const __m512i numbers = _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(kNumbers.data()));
    const int count = std::popcount(bits);
    // (The masked forms: g++ 12 takes the results of the others for uninitialized.)
    _mm512_storeu_si512(
        to, _mm512_add_epi16(base, _mm512_cvtepu8_epi16(_mm512_maskz_extracti64x4_epi64(0xff, numbers, 0))));
    if (count > 32) {
      _mm512_storeu_si512(
          to + 32,
          _mm512_add_epi16(base, _mm512_cvtepu8_epi16(_mm512_maskz_extracti64x4_epi64(0xff, numbers, 1))));
    }
    return to + count;
  }
};
#elif defined(SHOAL_SIMD)
struct Simd {
  static inline Masks of(const std::uint8_t* block, std::uint8_t separator) noexcept {
    const uint8x16_t bits = vcombine_u8(vcreate_u8(0x8040201008040201U), vcreate_u8(0x8040201008040201U));
    const auto equal = [&](std::uint8_t byte) {
      const uint8x16_t sought = vdupq_n_u8(byte);
      const auto part = [&](std::size_t i) { return vandq_u8(vceqq_u8(vld1q_u8(block + i), sought), bits); };
      // Adding neighbours three times gathers the bits of eight bytes in one.
      const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(part(0), part(16)), vpaddq_u8(part(32), part(48)));
      return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
    };
    const std::uint64_t newlines = equal(kNewline);
    return {equal(separator) | newlines, newlines};
  }
  static inline std::uint16_t* put(std::uint64_t bits, std::size_t from, std::uint16_t* to) noexcept {
    return put_by_table(bits, from, to);
  }
};
#endif

// Appends the block at offset `from` to the scan, which has `count` stops; returns how many it has then.
template <class By>
SHOAL_INLINE std::size_t append(Masks found, std::size_t from, std::size_t count, LineScan& scan) noexcept {
  const auto add_line = [&](std::uint64_t up_to_newline) SHOAL_ALWAYS {
    const int cells = std::popcount(found.stops & up_to_newline);
    scan.first_stop[scan.lines + 1] = static_cast<std::uint16_t>(count + static_cast<std::size_t>(cells));
  };
  // Few blocks have two newlines; whether one has one cannot be predicted.
  add_line(found.newlines ^ (found.newlines - 1));
  scan.lines += found.newlines != 0 ? 1 : 0;
  for (std::uint64_t more = found.newlines & (found.newlines - 1); more != 0; more &= more - 1) {
    add_line(more ^ (more - 1));
    ++scan.lines;
  }
  std::uint16_t* const first = scan.stops.data();
  return static_cast<std::size_t>(By::put(found.stops, from, first + count) - first);
}

template <class By>
SHOAL_INLINE void scan_by(std::span<const std::uint8_t> text, std::uint8_t separator,
                          LineScan& scan) noexcept {
  const std::size_t size = std::min(text.size(), LineScan::kBytes);
  std::size_t count = 0;
  std::size_t at = 0;
  scan.lines = 0;
  scan.first_stop[0] = 0;
  for (; at + kBlock <= size; at += kBlock) {
    count = append<By>(By::of(text.data() + at, separator), at, count, scan);
  }
  if (at < size) {
    std::array<std::uint8_t, kBlock> last{};
    std::memcpy(last.data(), text.data() + at, size - at);
    Masks found = By::of(last.data(), separator);
    const std::uint64_t inside = (std::uint64_t{1} << (size - at)) - 1;  // a separator may be zero
    found.stops &= inside;
    found.newlines &= inside;
    append<By>(found, at, count, scan);
  }
}

void scan_portably(std::span<const std::uint8_t> text, std::uint8_t separator, LineScan& scan) noexcept {
  scan_by<Portable>(text, separator, scan);
}

#if defined(SHOAL_SIMD)
SHOAL_SIMD void scan_by_simd(std::span<const std::uint8_t> text, std::uint8_t separator,
                             LineScan& scan) noexcept {
  scan_by<Simd>(text, separator, scan);
}
#endif
#if defined(SHOAL_COMPRESS)
SHOAL_COMPRESS void scan_by_compress(std::span<const std::uint8_t> text, std::uint8_t separator,
                                     LineScan& scan) noexcept {
  scan_by<Compress>(text, separator, scan);
}
#endif

}  // namespace

LineScanners line_scanners() noexcept {
  LineScanners found{};
  std::size_t n = 0;
#if defined(SHOAL_COMPRESS)
  if (has_compress()) {
    found[n++] = scan_by_compress;
  }
#endif
#if defined(SHOAL_SIMD)
  if (has_simd()) {
    found[n++] = scan_by_simd;
  }
#endif
  found[n] = scan_portably;
  return found;
}

void scan_lines(const std::uint8_t* text, std::size_t size, std::uint8_t separator, LineScan& scan) noexcept {
  static const LineScanner fastest = line_scanners()[0];
  fastest(std::span(text, size), separator, scan);
}

}  // namespace shoal
