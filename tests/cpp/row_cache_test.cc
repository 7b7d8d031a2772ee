// The cache of rows compared with plain maps. tests/cluster/worker/test_row_cache.py compares it with a twin
// that replaces the same rows.

#include "cache/row_cache.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check.h"

namespace shoal::row_cache_test {

namespace {

std::vector<std::uint64_t> some_hashes(std::mt19937_64& random, std::size_t keys) {
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t key = 1; key <= keys; ++key) {
    if (random() % 3 == 0) {
      hashes.push_back(key * 0x9e3779b97f4a7c15U);
    }
  }
  std::ranges::sort(hashes);
  return hashes;
}

}  // namespace

TEST(sums_leave_once_and_copies_are_the_last_answers) {
  std::mt19937_64 random(7);
  for (const std::size_t keys : {10U, 100U, 1000U}) {
    RowCache cache(300, 2, true);
    std::map<std::uint64_t, std::pair<float, std::uint32_t>> pushed;
    std::map<std::uint64_t, std::pair<float, std::uint32_t>> left;
    std::map<std::uint64_t, float> answers;
    const auto take = [&](const RowCache::Sums& sums) {
      CHECK(std::ranges::is_sorted(sums.hashes));
      CHECK(sums.grads.size() == 2 * sums.hashes.size() && sums.counts.size() == sums.hashes.size());
      for (std::size_t i = 0; i < sums.hashes.size(); ++i) {
        left[sums.hashes[i]].first += sums.grads[2 * i];
        left[sums.hashes[i]].second += sums.counts[i];
        CHECK_EQ(sums.grads[2 * i + 1], 2 * sums.grads[2 * i]);
      }
    };
    for (std::uint32_t clock = 1; clock < 40; ++clock) {
      const auto hashes = some_hashes(random, keys);
      std::vector<float> rows(2 * hashes.size(), -1);
      RowCache::Rest rest;
      cache.read(hashes, clock > 3 ? clock - 3 : 0, clock, true, rows, rest);
      take(rest.sums);
      CHECK(rest.joined.empty());
      std::vector<std::uint64_t> fetched;
      std::vector<float> answer;
      for (const std::uint32_t at : rest.fetched) {
        fetched.push_back(hashes[at]);
        answers[hashes[at]] = static_cast<float>(clock);
        answer.insert(answer.end(), {static_cast<float>(clock), 1});
        CHECK_EQ(rows[2 * at], -1.0F);
        rows[2 * at] = answers[hashes[at]];
      }
      cache.fill(fetched, clock, clock, true, answer);
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        CHECK_EQ(rows[2 * i], answers[hashes[i]]);
      }
      std::vector<float> grads;
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        const auto grad = static_cast<float>(random() % 9);
        grads.insert(grads.end(), {grad, 2 * grad});
        pushed[hashes[i]].first += grad;
        pushed[hashes[i]].second += 1;
      }
      RowCache::Sums passed;
      cache.add(hashes, grads, {}, clock, passed);
      take(passed);
      RowCache::Sums due;
      if (clock > 2) {
        cache.send_older(clock - 2, due);
      }
      take(due);
      CHECK(cache.verify());
    }
    RowCache::Sums rest;
    cache.send_older(RowCache::kAnyClock, rest);
    take(rest);
    CHECK_EQ(cache.sums(), 0);
    CHECK(left == pushed);
  }
}

TEST(sums_of_more_clocks_than_lists_have_numbers_leave_once_and_in_time) {
  constexpr std::uint32_t kClocks = 70000;
  RowCache cache(4 * kClocks, 1, false);
  std::uint64_t sent = 0;
  const auto take = [&](std::uint32_t clock) {
    RowCache::Sums sums;
    cache.send_older(clock, sums);
    sent += sums.hashes.size();
  };
  RowCache::Sums passed;
  for (std::uint32_t clock = 0; clock < kClocks; ++clock) {
    const std::vector<std::uint64_t> hash{(clock + 1) * 0x9e3779b97f4a7c15U};
    std::vector<float> row(1);
    RowCache::Rest rest;
    cache.read(hash, 0, clock + 1, true, row, rest);
    cache.add(hash, row, {}, clock, passed);
  }
  const std::uint64_t added = kClocks - passed.hashes.size();
  CHECK_EQ(cache.sums(), added);
  take(10);
  CHECK(sent >= 10 && sent <= 11);
  take(kClocks / 2);
  CHECK(sent >= kClocks / 2 - passed.hashes.size());
  take(kClocks);
  CHECK_EQ(sent, added);
  CHECK(cache.verify());
}

}  // namespace shoal::row_cache_test
