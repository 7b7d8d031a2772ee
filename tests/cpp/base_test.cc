// Memory, random rounding, 16-bit floats, checksums.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/noise.h"
#include "check.h"

namespace shoal {
namespace {

TEST(a_region_keeps_its_bytes_and_reads_zero_beyond_them_at_every_size) {
  Region region;
  std::size_t written = 0;
  for (const std::size_t bytes : {1UL, 64UL, 65UL, 4000UL, 8191UL, 8192UL, 8193UL, 100'000UL, 5'000'000UL}) {
    const std::size_t before = region.bytes();
    region.resize(bytes);
    CHECK(region.bytes() >= bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % kCacheLine, 0);
    for (std::size_t i = 0; i < written; ++i) {
      CHECK(region.data()[i] == static_cast<std::byte>(i * 7 % 251 + 1));
    }
    for (std::size_t i = before; i < region.bytes(); ++i) {
      CHECK(region.data()[i] == std::byte{0});
    }
    for (; written < region.bytes(); ++written) {
      region.data()[written] = static_cast<std::byte>(written * 7 % 251 + 1);
    }
  }
  region.resize(100);
  for (std::size_t i = 0; i < 100; ++i) {
    CHECK(region.data()[i] == static_cast<std::byte>(i * 7 % 251 + 1));
  }
  region.resize(0);
  CHECK(region.data() == nullptr);
}

TEST(forgotten_bytes_read_zero_and_those_before_them_stay) {
  for (const std::size_t bytes : {1000UL, 100'000UL}) {
    for (const std::size_t offset : {0UL, 1UL, 999UL, 4095UL, 4096UL, 4097UL, 99'999UL, 200'000UL}) {
      Region region(bytes);
      std::memset(region.data(), 3, region.bytes());
      region.forget(offset);
      for (std::size_t i = 0; i < region.bytes(); ++i) {
        CHECK(region.data()[i] == (i < offset ? std::byte{3} : std::byte{0}));
      }
    }
  }
}

TEST(a_moved_region_takes_its_memory_along) {
  Region from(100);
  from.data()[5] = std::byte{9};
  Region to = std::move(from);
  CHECK(to.data()[5] == std::byte{9});
}

TEST(stochastic_rounding_keeps_the_mean_and_leaves_float32_alone) {
  std::mt19937 random(1);
  for (const double x : {1.0 + 0.3 * 0x1p-23, -5.0 - 0.9 * 0x1p-21, 1e-30 * (1 + 1e-8), 4194304.1}) {
    const float near = static_cast<float>(x);
    const double low =
        static_cast<double>(static_cast<double>(near) <= x ? near : std::nextafter(near, -1e30F));
    const double high = static_cast<double>(std::nextafter(static_cast<float>(low), 1e30F));
    constexpr int kDraws = 200'000;
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) {
      const auto rounded = static_cast<double>(round_stochastically(x, static_cast<std::uint32_t>(random())));
      CHECK(rounded == low || rounded == high);
      sum += (rounded - low) / (high - low);
    }
    CHECK_NEAR(sum / kDraws, (x - low) / (high - low), 5 * 0.5 / std::sqrt(kDraws));
  }
  for (int i = 0; i < 100'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float x = std::bit_cast<float>(bits);
    if (std::isfinite(x)) {
      CHECK(round_stochastically(static_cast<double>(x), static_cast<std::uint32_t>(random())) == x);
    }
  }
  CHECK(std::isinf(round_stochastically(1e39, 0)));
  CHECK(std::isnan(round_stochastically(std::numeric_limits<double>::quiet_NaN(), 0x1fffffff)));
}

TEST(every_16_bit_number_survives_widening_and_narrowing) {
  std::mt19937 random(2);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const auto noise = static_cast<std::uint32_t>(random());
    const float as_float16 = from_float16(half);
    const float as_bfloat16 = from_bfloat16(half);
    if (std::isnan(as_float16)) {
      CHECK(std::isnan(from_float16(to_float16(as_float16, noise))));
    } else {
      CHECK_EQ(to_float16(as_float16, noise), half);
    }
    if (std::isnan(as_bfloat16)) {
      CHECK(std::isnan(from_bfloat16(to_bfloat16(as_bfloat16, noise))));
    } else {
      CHECK_EQ(to_bfloat16(as_bfloat16, noise), half);
    }
  }
  CHECK_EQ(from_float16(0x3c00), 1.0F);
  CHECK_EQ(from_float16(0x0001), 0x1p-24F);
  CHECK_EQ(from_float16(0x7bff), 65504.0F);
}

TEST(narrowing_takes_the_neighbour_above_as_often_as_it_is_near) {
  std::mt19937 random(3);
  constexpr int kDraws = 100'000;
  for (const float x : {1.0001F, -3.14159F, 0.7F * 0x1p-24F, 1e-5F, 1000.3F}) {
    double sum16 = 0;
    double sum_b16 = 0;
    for (int i = 0; i < kDraws; ++i) {
      const auto noise = static_cast<std::uint32_t>(random());
      sum16 += static_cast<double>(from_float16(to_float16(x, noise)));
      sum_b16 += static_cast<double>(from_bfloat16(to_bfloat16(x, noise)));
    }
    const auto exact = static_cast<double>(x);
    const double grid16 = std::max(std::abs(exact) * 0x1p-10, 0x1p-24);
    CHECK_NEAR(sum16 / kDraws, exact, 5 * grid16 / (2 * std::sqrt(kDraws)));
    CHECK_NEAR(sum_b16 / kDraws, exact, 5 * std::abs(exact) * 0x1p-7 / (2 * std::sqrt(kDraws)));
  }
  CHECK_EQ(from_float16(to_float16(1e6F, 0)), 65504.0F);
  CHECK_EQ(from_float16(to_float16(-65519.0F, 0xffffffff)), -65504.0F);
  CHECK(std::isfinite(from_bfloat16(to_bfloat16(std::numeric_limits<float>::max(), 0xffffffff))));
  CHECK(std::isinf(from_float16(to_float16(std::numeric_limits<float>::infinity(), 0xffffffff))));
}

TEST(crc32c_has_the_known_values_and_extends) {
  const auto bytes = [](const std::vector<unsigned char>& data) { return std::as_bytes(std::span(data)); };
  CHECK_EQ(crc32c(bytes({'1', '2', '3', '4', '5', '6', '7', '8', '9'})), 0xe3069283U);
  CHECK_EQ(crc32c(bytes(std::vector<unsigned char>(32, 0))), 0x8a9136aaU);  // RFC 3720, B.4
  CHECK_EQ(crc32c(bytes(std::vector<unsigned char>(32, 0xff))), 0x62a8ab43U);
  CHECK_EQ(crc32c({}), 0U);
  std::mt19937 random(4);
  std::vector<unsigned char> data(20'000);
  for (auto& byte : data) {
    byte = static_cast<unsigned char>(random());
  }
  for (const std::size_t n : {0UL, 1UL, 7UL, 8UL, 9UL, 300UL, 3071UL, 3072UL, 3073UL, 6144UL, 20'000UL}) {
    const auto all = std::as_bytes(std::span(data)).first(n);
    CHECK_EQ(crc32c(all), crc32c_portable(all));
    CHECK_EQ(crc32c(all.subspan(n / 3), crc32c(all.first(n / 3))), crc32c(all));
  }
}

}  // namespace
}  // namespace shoal
