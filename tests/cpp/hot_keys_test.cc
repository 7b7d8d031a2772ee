// HotKeys compared with a map that counts every key.

#include "endpoint/hot_keys.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "base/mix.h"
#include "check.h"

namespace shoal::hot_keys_test {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

using Counts = std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t>;

// I1: no count is too high, or too low by more than the bound.
void check_counts(const HotKeys& hot, const Counts& counts) {
  std::uint64_t total = 0;
  for (const auto& [key, count] : counts) {
    total += count;
  }
  CHECK_EQ(hot.sampled(), total);
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> found;
  for (const HotKey& one : hot.hottest(HotKeys::kMost)) {
    found[{one.table, one.hash}] = one.count;
  }
  CHECK_EQ(found.size(), hot.size());
  CHECK(hot.size() <= HotKeys::kMost);
  for (const auto& [key, count] : counts) {
    const auto at = found.find(key);
    const std::uint64_t estimate = at == found.end() ? 0 : at->second;
    CHECK(estimate <= count && count <= estimate + total / HotKeys::kMost);
  }
}

}  // namespace

TEST(without_samples_nothing_is_hot) {
  HotKeys hot(1);
  hot.add(1, {});
  CHECK(hot.hottest(5).empty());
  CHECK_EQ(hot.sampled(), 0);
}

TEST(few_keys_have_their_exact_counts_per_table) {
  HotKeys hot(1, kNever);
  Counts counts;
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    const auto table = static_cast<std::uint32_t>(random() % 3);
    std::vector<std::uint64_t> hashes(random() % 50);
    for (auto& hash : hashes) {
      hash = random() % 2 == 0 ? kNever - random() % 40 : random() % 40;
      ++counts[{table, hash}];
    }
    hot.add(table, hashes);
  }
  CHECK_EQ(hot.size(), counts.size());
  for (const HotKey& one : hot.hottest(1000)) {
    CHECK_EQ(one.count, counts.at({one.table, one.hash}));
  }
}

TEST(the_hottest_come_first_and_no_more_than_asked_for) {
  HotKeys hot(1, kNever);
  for (std::uint64_t hash = 1; hash <= 20; ++hash) {
    hot.add(7, std::vector<std::uint64_t>(hash, hash));
  }
  const auto found = hot.hottest(3);
  CHECK_EQ(found.size(), 3);
  for (std::size_t place = 0; place < 3; ++place) {
    CHECK_EQ(found[place].hash, 20 - place);
    CHECK_EQ(found[place].count, 20 - place);
    CHECK_EQ(found[place].table, 7);
  }
}

TEST(counts_of_many_keys_are_within_their_bound) {
  HotKeys hot(1, kNever);
  Counts counts;
  std::mt19937_64 random(5);
  std::vector<std::uint64_t> hashes;
  for (int i = 0; i < 400'000; ++i) {
    // Every second one is any of 200,000, the others follow about 1 / k; all in one slot, so that they agree
    // in their top bits.
    const std::uint64_t key =
        random() % 2 == 0 ? random() % 200'000 : std::uint64_t{1} << (random() % 18U) | random() % 2;
    hashes.push_back(mix(key) >> 20U);
    ++counts[{1, hashes.back()}];
  }
  hot.add(1, hashes);
  check_counts(hot, counts);
  CHECK(hot.hottest(1)[0].count > 8'000);
}

TEST(a_stream_of_keys_that_all_differ_leaves_room_for_one_that_does_not) {
  HotKeys hot(1, kNever);
  Counts counts;
  std::uint64_t fresh = 1;
  for (int round = 0; round < 100; ++round) {
    std::vector<std::uint64_t> hashes{42};
    while (hashes.size() < 2'000) {
      hashes.push_back(mix(fresh++));
    }
    for (const std::uint64_t hash : hashes) {
      ++counts[{1, hash}];
    }
    hot.add(1, hashes);
  }
  check_counts(hot, counts);
  CHECK_EQ(hot.hottest(1)[0].hash, 42);
}

TEST(what_was_hot_is_forgotten) {
  HotKeys hot(1, 1'000);
  hot.add(1, std::vector<std::uint64_t>(10'000, 1));
  hot.add(1, std::vector<std::uint64_t>(4'000, 2));
  const auto found = hot.hottest(2);
  CHECK_EQ(found[0].hash, 2);
  CHECK(found[0].count > 800 && found[0].count <= 2'000);
  CHECK(found.size() == 1 || found[1].count < 100);
  CHECK(hot.sampled() <= 2'000);
  hot.add(1, std::vector<std::uint64_t>(20'000, 3));
  CHECK_EQ(hot.size(), 1);
}

TEST(a_list_that_is_sent_again_and_again_has_all_its_keys_sampled) {
  HotKeys hot;
  std::vector<std::uint64_t> hashes(512);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    hashes[i] = mix(i);
  }
  constexpr std::uint64_t kTimes = 20'000;
  for (std::uint64_t round = 0; round < kTimes; ++round) {
    hot.add(1, hashes);
  }
  const double expected = static_cast<double>(kTimes * hashes.size()) / HotKeys::kGap;
  CHECK(std::abs(static_cast<double>(hot.sampled()) - expected) < 0.05 * expected);
  CHECK_EQ(hot.size(), hashes.size());
  const auto found = hot.hottest(512);
  CHECK(found.front().count < 2 * expected / 512 + 20);
}

}  // namespace shoal::hot_keys_test
