#include "wire/values.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/noise.h"
#include "base/simd.h"

namespace shoal {

namespace {

// Rows are narrowed a chunk at a time: noise, narrowing, widening and errors are plain loops over arrays,
// which are vectorized.
constexpr std::size_t kChunk = 512;

// Eight partial sums hide the latency of the additions; a value's position determines its partial sum.
struct LossSum {
  static constexpr std::size_t kLanes = 8;
  std::array<double, kLanes> squared{};
  std::array<double, kLanes> largest{};

  void join(NarrowingErrors& loss) const noexcept {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      loss.squared += squared[lane];
      loss.largest = std::max(loss.largest, largest[lane]);
    }
  }
};

SHOAL_INLINE void add_error(float sent, float original, double& squared, double& largest) noexcept {
  const double error = std::abs(static_cast<double>(sent) - static_cast<double>(original));
  const double counted =
      error <= std::numeric_limits<double>::max() ? error : 0.0;  // neither infinite nor NaN
  squared += counted * counted;
  largest = counted > largest ? counted : largest;
}

SHOAL_CLONES void add_errors(const float* sent, const float* original, std::size_t size,
                             LossSum& sum) noexcept {
  std::size_t i = 0;
  for (; i + LossSum::kLanes <= size; i += LossSum::kLanes) {
    for (std::size_t lane = 0; lane < LossSum::kLanes; ++lane) {
      add_error(sent[i + lane], original[i + lane], sum.squared[lane], sum.largest[lane]);
    }
  }
  for (std::size_t lane = 0; i < size; ++i, ++lane) {
    add_error(sent[i], original[i], sum.squared[lane], sum.largest[lane]);
  }
}

SHOAL_CLONES void to_bfloat16_all(const float* from, const std::uint32_t* noise, std::uint16_t* to,
                                  std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = to_bfloat16(from[i], bits_for(noise[i], 0, std::bit_cast<std::uint32_t>(from[i])));
  }
}

SHOAL_CLONES void to_float16_all(const float* from, const std::uint32_t* noise, std::uint16_t* to,
                                 std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = to_float16(from[i], bits_for(noise[i], 0, std::bit_cast<std::uint32_t>(from[i])));
  }
}

template <class Word>
bool is_zero(Word value) noexcept {
  if constexpr (sizeof(Word) == 4) {
    return std::bit_cast<std::uint32_t>(value) == 0;
  } else {
    return value == 0;
  }
}

template <class Word>
std::size_t count_nonzero_of(std::span<const Word> values) noexcept {
  std::size_t count = 0;
  for (const Word value : values) {
    count += is_zero(value) ? 0U : 1U;
  }
  return count;
}

template <class Word>
void pack_of(std::span<const Word> values, std::span<std::byte> map, std::span<Word> kept) noexcept {
  std::size_t next = 0;
  for (std::size_t byte = 0; byte < map.size(); ++byte) {
    const std::size_t first = byte * 8;
    const std::size_t size = std::min<std::size_t>(8, values.size() - first);
    unsigned bits = 0;
    for (std::size_t i = 0; i < size; ++i) {
      bits |= (is_zero(values[first + i]) ? 0U : 1U) << i;
    }
    map[byte] = static_cast<std::byte>(bits);
    for (; bits != 0; bits &= bits - 1) {
      kept[next++] = values[first + static_cast<std::size_t>(std::countr_zero(bits))];
    }
  }
}

template <class Word, class Value>
void unpack_of(std::span<const std::byte> map, std::span<const Word> kept, std::span<float> out,
               const Value& value) noexcept {
  std::fill(out.begin(), out.end(), 0.0F);
  std::size_t next = 0;
  for (std::size_t byte = 0; byte < map.size(); ++byte) {
    for (auto bits = std::to_integer<unsigned>(map[byte]); bits != 0; bits &= bits - 1) {
      out[byte * 8 + static_cast<std::size_t>(std::countr_zero(bits))] = value(kept[next++]);
    }
  }
}

SHOAL_CLONES void widen_bfloat16(const std::uint16_t* from, float* to, std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = from_bfloat16(from[i]);
  }
}

SHOAL_CLONES void widen_float16(const std::uint16_t* from, float* to, std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = from_float16(from[i]);
  }
}

}  // namespace

void narrow(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
            Dtype dtype, std::uint64_t seed, std::uint64_t message, std::span<std::uint16_t> out,
            NarrowingErrors& loss) {
  SHOAL_CHECK(dtype != Dtype::kFloat32, "float32 values are sent as they are");
  SHOAL_CHECK(values.size() == hashes.size() * dim && out.size() == values.size(),
              std::to_string(values.size()) + " values, room for " + std::to_string(out.size()) + ", " +
                  std::to_string(hashes.size()) + " rows of " + std::to_string(dim));
  const std::uint64_t noise = step_noise(seed, message);
  LossSum sum;
  std::array<std::uint32_t, kChunk> bits;
  std::array<float, kChunk> wide;
  std::size_t row = 0;
  std::uint32_t element = 0;
  std::uint32_t of_row = hashes.empty() ? 0 : row_noise(noise, hashes[0]);
  for (std::size_t first = 0; first < values.size(); first += kChunk) {
    const std::size_t size = std::min(kChunk, values.size() - first);
    for (std::size_t i = 0; i < size; ++i) {
      bits[i] = element_noise(of_row, element);
      if (++element == dim) {
        element = 0;
        of_row = ++row < hashes.size() ? row_noise(noise, hashes[row]) : 0;
      }
    }
    const float* const from = values.data() + first;
    const auto to = out.subspan(first, size);
    if (dtype == Dtype::kBfloat16) {
      to_bfloat16_all(from, bits.data(), to.data(), size);
    } else {
      to_float16_all(from, bits.data(), to.data(), size);
    }
    widen(to, dtype, wide);
    add_errors(wide.data(), from, size, sum);
  }
  loss.values += values.size();
  sum.join(loss);
}

void widen(std::span<const std::uint16_t> values, Dtype dtype, std::span<float> out) noexcept {
  if (dtype == Dtype::kBfloat16) {
    widen_bfloat16(values.data(), out.data(), values.size());
  } else {
    widen_float16(values.data(), out.data(), values.size());
  }
}

std::size_t count_nonzero(std::span<const float> values) noexcept { return count_nonzero_of(values); }
std::size_t count_nonzero(std::span<const std::uint16_t> values) noexcept { return count_nonzero_of(values); }

void pack(std::span<const float> values, std::span<std::byte> map, std::span<float> kept) noexcept {
  pack_of(values, map, kept);
}

void pack(std::span<const std::uint16_t> values, std::span<std::byte> map,
          std::span<std::uint16_t> kept) noexcept {
  pack_of(values, map, kept);
}

std::size_t count_kept(std::span<const std::byte> map) noexcept {
  std::size_t count = 0;
  std::size_t byte = 0;
  for (; byte + 8 <= map.size(); byte += 8) {
    std::uint64_t word;
    std::memcpy(&word, map.data() + byte, sizeof word);
    count += static_cast<std::size_t>(std::popcount(word));
  }
  for (; byte < map.size(); ++byte) {
    count += static_cast<std::size_t>(std::popcount(std::to_integer<unsigned>(map[byte])));
  }
  return count;
}

bool is_map(std::span<const std::byte> map, std::uint64_t values) noexcept {
  if (map.size() != map_bytes(values)) {
    return false;
  }
  return values % 8 == 0 || std::to_integer<unsigned>(map.back()) >> (values % 8) == 0;
}

void unpack(std::span<const std::byte> map, std::span<const float> kept, std::span<float> out) noexcept {
  unpack_of(map, kept, out, [](float value) { return value; });
}

void unpack(std::span<const std::byte> map, std::span<const std::uint16_t> kept, Dtype dtype,
            std::span<float> out) noexcept {
  if (dtype == Dtype::kBfloat16) {
    unpack_of(map, kept, out, from_bfloat16);
  } else {
    unpack_of(map, kept, out, from_float16);
  }
}

}  // namespace shoal
