// Narrowing without bias, packing without loss.

#include "wire/values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/mix.h"
#include "base/noise.h"
#include "check.h"

namespace shoal::values_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> some_values(std::size_t size, double zeros, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) {
    value = static_cast<double>(random() % 1000) < zeros * 1000 ? 0.0F : normal(random);
  }
  if (size > 3) {
    values[1] = -0.0F;
    values[2] = kInfinity;
    values[3] = std::numeric_limits<float>::denorm_min();
  }
  return values;
}

std::vector<std::uint64_t> some_hashes(std::size_t size) {
  std::vector<std::uint64_t> hashes(size);
  for (std::size_t i = 0; i < size; ++i) {
    hashes[i] = mix(i);
  }
  return hashes;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

TEST(packed_values_come_back_to_the_bit) {
  for (const std::size_t size : {0UL, 1UL, 7UL, 8UL, 9UL, 64UL, 385UL, 1000UL}) {
    for (const double zeros : {0.0, 0.5, 0.95, 1.0}) {
      const std::vector<float> values = some_values(size, zeros, static_cast<unsigned>(size));
      std::vector<std::byte> map(map_bytes(size), std::byte{0xff});
      std::vector<float> kept(count_nonzero(std::span(values)));
      pack(values, map, kept);
      CHECK(is_map(map, size));
      CHECK_EQ(count_kept(map), kept.size());
      CHECK(std::all_of(kept.begin(), kept.end(),
                        [](float x) { return std::bit_cast<std::uint32_t>(x) != 0; }));
      std::vector<float> back(size, 5.0F);
      unpack(map, kept, back);
      CHECK(same_bits(back, values));
    }
  }
}

TEST(packed_halves_come_back_as_float32) {
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    const std::vector<float> values = some_values(385, 0.7, 3);
    std::vector<std::uint16_t> halves(values.size());
    NarrowingErrors loss;
    narrow(values, some_hashes(values.size()), 1, dtype, 1, 2, halves, loss);
    std::vector<float> wide(values.size());
    widen(halves, dtype, wide);
    std::vector<std::byte> map(map_bytes(halves.size()));
    std::vector<std::uint16_t> kept(count_nonzero(std::span<const std::uint16_t>(halves)));
    CHECK(kept.size() < 200);
    pack(halves, map, kept);
    std::vector<float> back(values.size());
    unpack(map, kept, dtype, back);
    CHECK(same_bits(back, wide));
  }
}

TEST(a_map_has_its_length_and_nothing_behind_the_last_value) {
  const std::vector<std::byte> map = {std::byte{0xff}, std::byte{0x07}};
  CHECK(is_map(map, 11) && is_map(map, 12) && is_map(map, 16));
  CHECK(!is_map(map, 10) && !is_map(map, 9) && !is_map(map, 8) && !is_map(map, 17) && !is_map(map, 0));
  CHECK(is_map({}, 0) && !is_map({}, 1));
}

TEST(narrowed_values_are_right_on_average_and_the_error_is_told) {
  constexpr std::size_t kDim = 3;
  const std::vector<float> row = {0.3F, -1.7F, 1e-3F};
  const std::vector<std::uint64_t> hash = {mix(9)};
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    constexpr int kDraws = 20'000;
    std::vector<double> sum(kDim);
    double squared = 0;
    double largest = 0;
    NarrowingErrors loss;
    for (int message = 0; message < kDraws; ++message) {
      std::vector<std::uint16_t> out(kDim);
      narrow(row, hash, kDim, dtype, 4, static_cast<std::uint64_t>(message), out, loss);
      std::vector<float> wide(kDim);
      widen(out, dtype, wide);
      for (std::size_t i = 0; i < kDim; ++i) {
        const double error = static_cast<double>(wide[i]) - static_cast<double>(row[i]);
        sum[i] += error;
        squared += error * error;
        largest = std::max(largest, std::abs(error));
      }
    }
    for (std::size_t i = 0; i < kDim; ++i) {
      const double step =
          std::abs(static_cast<double>(row[i])) * (dtype == Dtype::kBfloat16 ? 0x1p-7 : 0x1p-10);
      CHECK_NEAR(sum[i] / kDraws, 0.0, 5 * 0.5 * step / std::sqrt(kDraws));
    }
    CHECK_EQ(loss.values, kDim * kDraws);
    CHECK_NEAR(loss.squared, squared, 1e-9 * squared);
    CHECK_EQ(loss.largest, largest);
    CHECK(largest > 0);
  }
}

TEST(noise_depends_on_seed_message_hash_and_element_and_on_nothing_else) {
  const std::vector<float> values(64, 0.3F);
  const auto narrowed = [&](std::uint64_t seed, std::uint64_t message, std::size_t dim, std::uint64_t first) {
    std::vector<std::uint64_t> hashes(values.size() / dim);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      hashes[i] = mix(first + i);
    }
    std::vector<std::uint16_t> out(values.size());
    NarrowingErrors loss;
    narrow(values, hashes, dim, Dtype::kBfloat16, seed, message, out, loss);
    return out;
  };
  const auto base = narrowed(1, 1, 1, 0);
  CHECK(base == narrowed(1, 1, 1, 0));
  CHECK(base != narrowed(2, 1, 1, 0));
  CHECK(base != narrowed(1, 2, 1, 0));
  CHECK(base != narrowed(1, 1, 1, 100));
  CHECK(base != narrowed(1, 1, 64, 0));
  // A row's values are the same in whatever company they travel: parts of a call, cut anywhere.
  const auto later = narrowed(1, 1, 1, 32);
  CHECK(std::equal(later.begin(), later.begin() + 32, base.begin() + 32));
  const auto one_row = narrowed(1, 1, 64, 0);
  CHECK(std::count(one_row.begin(), one_row.end(), one_row[0]) < 64);
}

TEST(what_is_not_finite_passes_and_does_not_spoil_the_error) {
  const std::vector<float> values = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(), 1e30F};
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    std::vector<std::uint16_t> out(4);
    std::vector<float> wide(4);
    NarrowingErrors loss;
    narrow(values, some_hashes(4), 1, dtype, 1, 1, out, loss);
    widen(out, dtype, wide);
    CHECK(wide[0] == kInfinity && wide[1] == -kInfinity && std::isnan(wide[2]));
    CHECK(std::isfinite(loss.squared) && std::isfinite(loss.largest));
    CHECK(dtype == Dtype::kBfloat16 || wide[3] == 65504.0F);
  }
}

TEST(sizes_that_do_not_fit_are_the_callers_mistake) {
  const std::vector<float> values(6);
  std::vector<std::uint16_t> out(6);
  NarrowingErrors loss;
  CHECK_THROWS(narrow(values, some_hashes(2), 2, Dtype::kBfloat16, 1, 1, out, loss),
               "6 values, room for 6, 2 rows of 2");
  CHECK_THROWS(narrow(values, some_hashes(3), 2, Dtype::kFloat32, 1, 1, out, loss), "float32");
}

}  // namespace
}  // namespace shoal::values_test
