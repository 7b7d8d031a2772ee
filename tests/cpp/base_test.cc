// Memory, random rounding, 16-bit floats, checksums.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/crc32c.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/noise.h"
#include "check.h"

namespace shoal::base_test {
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

// What /proc/self/smaps says of the mapping that has the address; empty if it cannot be read.
std::string flags_of(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char between = 0;
    std::istringstream in(line);
    if (in >> std::hex >> begin >> between >> end && between == '-') {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      is_inside = begin <= at && at < end;
    } else if (is_inside && line.starts_with("VmFlags:")) {
      return line;
    }
  }
  return {};
}

TEST(regions_become_huge_pages_only_where_they_fill_them) {
  Region region(100'000);  // reserves more addresses than it has bytes
  const bool has_huge_pages = std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
  if (!has_huge_pages || flags_of(region.data()).empty() || check::is_emulated()) {
    return;  // another system
  }
  CHECK(flags_of(region.data()).find(" nh") != std::string::npos);
  region.resize(5'000'000);
  CHECK(flags_of(region.data()).find(" nh") == std::string::npos);
  CHECK(flags_of(region.data()).find(" hg") != std::string::npos);
}

TEST(a_region_of_huge_pages_keeps_its_bytes_and_its_alignment_wherever_it_is_stretched) {
  Region region;
  std::vector<Region> in_the_way;  // so that it cannot always grow in place
  std::size_t written = 0;
  for (const std::size_t bytes : {1'900'000UL, 2'200'000UL, 4'194'304UL, 4'200'000UL, 6'291'456UL,
                                  9'000'000UL, 3'000'000UL, 5'000'000UL, 1'000'000UL, 2'500'000UL}) {
    const std::size_t before = region.bytes();
    region.resize(bytes);
    region.populate(std::min(before, region.bytes()));
    in_the_way.emplace_back(std::size_t{4} << 20U);
    if (bytes >= HugeBlock::kBytes) {
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % HugeBlock::kBytes, 0);
    }
    written = std::min(written, region.bytes());
    for (std::size_t i = 0; i < region.bytes(); ++i) {
      if (region.data()[i] != (i < written ? static_cast<std::byte>(i * 7 % 251 + 1) : std::byte{0})) {
        CHECK_EQ(i, region.bytes());
      }
    }
    for (; written < region.bytes(); ++written) {
      region.data()[written] = static_cast<std::byte>(written * 7 % 251 + 1);
    }
  }
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

TEST(a_region_takes_whole_cache_lines_and_from_16_kib_whole_pages) {
  constexpr std::size_t kPage = 4096;
  for (const std::size_t bytes : {1UL, 64UL, 65UL, 16'383UL, 16'384UL, 16'385UL, 100'000UL, 5'000'001UL}) {
    const std::size_t unit = bytes >= Region::kMapped ? kPage : kCacheLine;
    const std::size_t taken = Region::rounded(bytes);
    CHECK_EQ(taken % unit, 0);
    CHECK(taken >= bytes && taken < bytes + unit);
    CHECK_EQ(Region(bytes).bytes(), taken);
  }
  CHECK_EQ(Region::rounded(0), 0);
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

TEST(a_buffer_has_room_for_all_that_was_asked_for_on_the_heap_and_in_pages_of_its_own) {
  constexpr std::size_t kMapped = Buffer<double>::kMapped / sizeof(double);
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, kMapped - 1, kMapped, kMapped + 1}) {
    Buffer<double> buffer(n);
    CHECK_EQ(buffer.size(), n);
    CHECK_EQ(buffer.end() - buffer.begin(), n);
    for (std::size_t i = 0; i < n; i += i + 1000 < n ? 1000 : 1) {
      buffer[i] = static_cast<double>(i);
    }
    Buffer<double> moved = std::move(buffer);
    CHECK_EQ(moved.size(), n);
    CHECK_EQ(buffer.size(), 0);
    for (std::size_t i = 0; i < n; i += i + 1000 < n ? 1000 : 1) {
      CHECK_EQ(moved[i], static_cast<double>(i));
    }
  }
}

TEST(a_claim_has_room_and_the_same_memory_serves_smaller_ones) {
  Buffer<std::uint32_t> buffer;
  CHECK_EQ(buffer.claim(0).size(), 0);
  std::size_t greatest = 0;
  for (const std::size_t n :
       {10UL, 3UL, 12UL, 13UL, 14UL, 15UL, 16UL, 17UL, 1000UL, 1251UL, 0UL, 20'000'000UL}) {
    const std::uint32_t* const before = buffer.data();
    const std::size_t room = buffer.size();
    const std::span<std::uint32_t> claimed = buffer.claim(n);
    CHECK_EQ(claimed.size(), n);
    CHECK(buffer.size() >= n);
    CHECK_EQ(claimed.data(), buffer.data());
    CHECK(n > room || buffer.data() == before);
    greatest = std::max(greatest, n);
    CHECK(buffer.size() <= greatest + greatest / 4);
    std::fill(claimed.begin(), claimed.end(), 7U);
  }
}

// What `noise` depends on must change its bits: nearly all of a thousand neighbours differ, in every bit.
void check_spreads(const std::function<std::uint32_t(std::uint32_t)>& noise) {
  constexpr std::uint32_t kDraws = 1000;
  std::vector<std::uint32_t> seen;
  std::array<int, 32> ones{};
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    seen.push_back(noise(i));
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
      ones[bit] += static_cast<int>(seen.back() >> bit & 1U);
    }
  }
  std::sort(seen.begin(), seen.end());
  CHECK(std::unique(seen.begin(), seen.end()) - seen.begin() > kDraws - 3);
  for (const int count : ones) {
    CHECK_NEAR(count, static_cast<int>(kDraws / 2), 90);  // six standard deviations
  }
}

TEST(rounding_bits_depend_on_the_seed_the_step_the_key_the_element_the_column_and_the_number_replaced) {
  const auto bits = [](std::uint64_t seed, std::uint64_t step, std::uint64_t hash, std::uint32_t element,
                       std::uint32_t column, std::uint32_t old) {
    return bits_for(element_noise(row_noise(step_noise(seed, step), hash), element), column, old);
  };
  check_spreads([&](std::uint32_t i) { return bits(i, 5, 6, 7, 1, 9); });
  check_spreads([&](std::uint32_t i) { return bits(4, i, 6, 7, 1, 9); });
  check_spreads([&](std::uint32_t i) { return bits(4, 5, mix(i), 7, 1, 9); });
  check_spreads([&](std::uint32_t i) { return bits(4, 5, 6, i, 1, 9); });
  check_spreads([&](std::uint32_t i) { return bits(4, 5, 6, 7, i, 9); });
  check_spreads([&](std::uint32_t i) { return bits(4, 5, 6, 7, 1, i); });
}

TEST(every_16_bit_number_survives_widening_and_narrowing) {
  std::mt19937 random(2);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float as_float16 = from_float16(half);
    const float as_bfloat16 = from_bfloat16(half);
    for (const std::uint32_t noise : {0U, 0xffffffffU, static_cast<std::uint32_t>(random())}) {
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
  std::vector<std::size_t> sizes = {0,    1,    7,    8,      9,      300,    3071,
                                    3072, 3073, 6144, 16'383, 16'384, 16'385, 20'000};
  for (std::size_t n = 1000; n < 1600; ++n) {
    sizes.push_back(n);  // around the sizes at which other instructions are used, and each remainder
  }
  std::vector<std::byte> copy(data.size() + 1);
  for (const std::size_t n : sizes) {
    const auto all = std::as_bytes(std::span(data)).first(n);
    copy.assign(copy.size(), std::byte{0});
    CHECK_EQ(crc32c_copy(all, copy, 12345), crc32c(all, 12345));
    CHECK(std::ranges::equal(all, std::span(copy).first(n)));
    CHECK(copy[n] == std::byte{0});
    CHECK_EQ(crc32c(all.subspan(n / 7), 99), crc32c_portable(all.subspan(n / 7), 99));
    CHECK_EQ(crc32c(all), crc32c_portable(all));
    CHECK_EQ(crc32c(all.subspan(n / 3), crc32c(all.first(n / 3))), crc32c(all));
    CHECK_EQ(crc32c_portable(all.subspan(n / 3), crc32c_portable(all.first(n / 3))), crc32c(all));
  }
}

}  // namespace
}  // namespace shoal::base_test
