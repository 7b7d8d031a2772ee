// Key lists and their digests; small gradients that are sent rarely.

#include "endpoint/key_list_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mix.h"
#include "check.h"
#include "wire/significance.h"

namespace shoal::key_list_cache_test {
namespace {

using Hashes = std::vector<std::uint64_t>;

TEST(a_digest_is_murmur3_x64_128_of_the_bytes) {
  // From tests/support/oracle/wire.py, whose murmur3_128 gives the published digest of a sentence.
  const Hashes none;
  const Hashes one = {1};
  const Hashes three = {1, 2, 3};
  CHECK(digest(none, 0) == (Digest{0, 0}));
  CHECK(digest(one, 0) == (Digest{0x4403b7fb05c44aU, 0x3d8acdb4d36d9c06U}));
  CHECK(digest(three, 0xdeadbeef) == (Digest{0x140bdaf005e609f4U, 0x2bacb162c536a19dU}));
}

TEST(every_bit_of_a_list_its_order_its_length_and_the_seed_change_the_digest) {
  Hashes hashes(7);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    hashes[i] = mix(i);
  }
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  const auto add = [&](const Hashes& list, std::uint32_t seed) {
    const Digest found = digest(list, seed);
    return seen.emplace(found.first, found.second).second;
  };
  CHECK(add(hashes, 0));
  CHECK(add(hashes, 1));
  for (std::size_t bit = 0; bit < hashes.size() * 64; ++bit) {
    Hashes other = hashes;
    other[bit / 64] ^= std::uint64_t{1} << (bit % 64);
    CHECK(add(other, 0));
  }
  for (std::size_t size = 0; size < 50; ++size) {
    CHECK(add(Hashes(size), 0));
  }
  std::swap(hashes[0], hashes[1]);
  CHECK(add(hashes, 0));
}

TEST(a_kept_list_is_found_by_digest_and_length) {
  KeyListCache lists(10'000);
  const Hashes hashes = {1, 5, 9};
  const Digest name = digest(hashes, 0);
  CHECK(!lists.find(name, 3));
  lists.insert(name, hashes);
  const auto found = lists.find(name, 3);
  CHECK(found && std::equal(found->begin(), found->end(), hashes.begin(), hashes.end()));
  CHECK(!lists.find(name, 2) && !lists.find({name.first, ~name.second}, 3) &&
        !lists.find({~name.first, name.second}, 3));
  lists.insert(name, hashes);
  CHECK_EQ(lists.size(), 1);
  lists.clear();
  CHECK(!lists.find(name, 3));
  CHECK_EQ(lists.bytes(), 0);
}

TEST(what_was_not_asked_for_longest_makes_room) {
  std::mt19937 random(3);
  constexpr std::size_t kCapacity = 20'000;
  KeyListCache lists(kCapacity);
  // The slow reference: everything in order of use, cut to the capacity.
  std::list<std::pair<std::size_t, Hashes>> used;
  const auto touch = [&](std::size_t id) {
    const auto at = std::find_if(used.begin(), used.end(), [&](const auto& one) { return one.first == id; });
    used.splice(used.begin(), used, at);
  };
  for (int round = 0; round < 5000; ++round) {
    const std::size_t id = random() % 60;
    Hashes hashes(1 + id * 13 % 400, id);
    const Digest name = digest(hashes, 7);
    const bool there =
        std::any_of(used.begin(), used.end(), [&](const auto& one) { return one.first == id; });
    if (random() % 2 == 0) {
      CHECK_EQ(static_cast<bool>(lists.find(name, hashes.size())), there);
      if (there) touch(id);
    } else {
      lists.insert(name, hashes);
      if (there) {
        touch(id);
      } else {
        used.emplace_front(id, hashes);
        const auto bytes = [&] {
          std::size_t sum = 0;
          for (const auto& one : used) sum += one.second.size() * 8 + 160;
          return sum;
        };
        while (bytes() > kCapacity) used.pop_back();
      }
    }
    CHECK_EQ(std::string(lists.verify()), "");
    CHECK_EQ(lists.size(), used.size());
  }
}

TEST(a_list_larger_than_the_room_is_not_kept_and_drives_nothing_out) {
  KeyListCache lists(1000);
  const Hashes small = {1, 2};
  const Hashes large(200);
  lists.insert(digest(small, 0), small);
  lists.insert(digest(large, 0), large);
  CHECK(lists.find(digest(small, 0), 2).has_value());
  CHECK(!lists.find(digest(large, 0), 200));
  CHECK_EQ(std::string(lists.verify()), "");
}

TEST(small_gradients_are_right_on_average_and_sent_as_seldom_as_they_are_small) {
  constexpr std::size_t kDim = 3;
  constexpr int kDraws = 40'000;
  const std::vector<float> row = {0.01F, -0.02F, 0.0F};
  const Hashes hash = {mix(4)};
  std::vector<double> sum(kDim);
  Significance counts;
  double squared = 0;
  for (int call = 0; call < kDraws; ++call) {
    std::vector<float> out(kDim);
    filter_significant(row, hash, kDim, 0.1, 5, static_cast<std::uint64_t>(call), out, counts);
    CHECK(out[1] == 0.0F || std::abs(out[1] + 0.1F) < 1e-8F);
    for (std::size_t i = 0; i < kDim; ++i) {
      sum[i] += static_cast<double>(out[i]);
      const double error = static_cast<double>(out[i]) - static_cast<double>(row[i]);
      squared += error * error;
    }
  }
  for (std::size_t i = 0; i < kDim; ++i) {
    const auto g = std::abs(static_cast<double>(row[i]));
    CHECK_NEAR(sum[i] / kDraws, static_cast<double>(row[i]), 5 * std::sqrt(0.1 * g / kDraws) + 1e-12);
  }
  CHECK_NEAR(static_cast<double>(counts.raised), 0.2 * kDraws, 5 * std::sqrt(0.16 * kDraws));
  CHECK_EQ(counts.raised + counts.dropped, kDraws);
  CHECK_EQ(counts.rows, kDraws);
  CHECK_NEAR(counts.squared, squared, 1e-9 * squared);
}

TEST(rows_at_the_threshold_zeros_and_what_is_not_finite_stay) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {
      0.5F, -0.5F, 0.0F, -0.0F, kInfinity, std::numeric_limits<float>::quiet_NaN(), 9.0F};
  Hashes hashes(values.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = mix(i);
  std::vector<float> out(values.size(), 1.0F);
  Significance counts;
  filter_significant(values, hashes, 1, 0.5, 1, 1, out, counts);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(out[i] == values[i] || (std::isnan(out[i]) && std::isnan(values[i])));
  }
  CHECK(std::signbit(out[3]));
  CHECK_EQ(counts.dropped + counts.raised, 0);
  CHECK_EQ(counts.squared, 0.0);
}

TEST(a_rows_chance_does_not_depend_on_its_company) {
  std::vector<float> values(100, 0.05F);
  Hashes hashes(100);
  for (std::size_t i = 0; i < hashes.size(); ++i) hashes[i] = mix(i);
  std::vector<float> all(100);
  Significance counts;
  filter_significant(values, hashes, 1, 0.1, 3, 8, all, counts);
  CHECK(counts.dropped > 20 && counts.raised > 20);
  std::vector<float> part(40);
  filter_significant(std::span(values).subspan(30, 40), std::span(hashes).subspan(30, 40), 1, 0.1, 3, 8, part,
                     counts);
  CHECK(std::equal(part.begin(), part.end(), all.begin() + 30));
  std::vector<float> other(100);
  filter_significant(values, hashes, 1, 0.1, 3, 9, other, counts);
  CHECK(other != all);
  filter_significant(values, hashes, 1, 0.1, 3, 8, values, counts);  // in place
  CHECK(values == all);
  CHECK_THROWS(filter_significant(values, hashes, 2, 0.1, 3, 8, values, counts), "100 rows of 2");
  CHECK_THROWS(filter_significant(values, hashes, 1, -0.1, 3, 8, values, counts), "threshold");
}

}  // namespace
}  // namespace shoal::key_list_cache_test
