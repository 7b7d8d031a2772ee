// Count-min sketches compared with plain loops over the positions.

#include "kernel/count_min.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "check.h"

namespace shoal::count_min_test {

TEST(counters_are_the_sums_over_positions) {
  std::mt19937_64 random(3);
  ThreadPool pool(3);
  for (const std::size_t n : {0U, 1U, 31U, 32U, 33U, 500U, 5000U}) {
    const CountMin sketch{random(), 3, 1 + random() % 700};
    std::vector<std::uint64_t> keys(n);
    std::vector<std::int64_t> counts(n);
    for (std::size_t i = 0; i < n; ++i) {
      keys[i] = random() % 3 == 0 ? random() % 5 : random();
      counts[i] = static_cast<std::int64_t>(random());  // sums wrap around
    }
    std::vector<std::int64_t> positions(3 * n);
    count_min_positions(sketch, keys, positions, pool);
    std::vector<std::uint64_t> want(3 * sketch.width);
    std::vector<std::int64_t> ones(3 * sketch.width);
    for (std::size_t at = 0; at < 3 * n; ++at) {
      const auto position = static_cast<std::size_t>(positions[at]);
      CHECK_EQ(position / sketch.width, at / n);
      want[position] += static_cast<std::uint64_t>(counts[at % n]);
      ++ones[position];
    }
    std::vector<std::int64_t> counters(3 * sketch.width + 5, 0);
    count_min_add(sketch, keys, counts, counters, pool);
    CHECK(std::equal(want.begin(), want.end(), counters.begin(),
                     [](std::uint64_t a, std::int64_t b) { return a == static_cast<std::uint64_t>(b); }));
    CHECK_EQ(std::count(counters.end() - 5, counters.end(), 0), 5);
    std::vector<std::int64_t> counted(3 * sketch.width);
    count_min_add(sketch, keys, {}, counted, pool);
    CHECK(counted == ones);
  }
}

TEST(rows_and_seeds_have_different_hash_functions) {
  ThreadPool pool(1);
  std::vector<std::uint64_t> keys(64);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i;
  }
  std::set<std::vector<std::int64_t>> seen;
  for (const std::uint64_t seed : {0U, 1U, 2U}) {
    std::vector<std::int64_t> positions(4 * keys.size());
    count_min_positions({seed, 4, 1000}, keys, positions, pool);
    for (std::size_t row = 0; row < 4; ++row) {
      std::vector<std::int64_t> of(keys.size());
      for (std::size_t i = 0; i < keys.size(); ++i) {
        of[i] = positions[row * keys.size() + i] - static_cast<std::int64_t>(row * 1000);
        CHECK(of[i] >= 0 && of[i] < 1000);
      }
      seen.insert(of);
    }
  }
  CHECK_EQ(seen.size(), std::size_t{12});
}

TEST(sketches_that_do_not_fit_their_counters_are_refused) {
  ThreadPool pool(1);
  const std::vector<std::uint64_t> keys{1, 2};
  const std::vector<std::int64_t> one{1};
  std::vector<std::int64_t> counters(6);
  CHECK_THROWS(count_min_add({0, 0, 3}, keys, {}, counters, pool), "at least one row");
  CHECK_THROWS(count_min_add({0, 2, 4}, keys, {}, counters, pool), "8 numbers, got 6");
  CHECK_THROWS(count_min_add({0, 2, 3}, keys, one, counters, pool), "each of the 2 keys, got 1");
  CHECK_THROWS(count_min_add({0, 8, std::numeric_limits<std::size_t>::max() / 32}, keys, {}, counters, pool),
               "memory");
  CHECK_THROWS(count_min_positions({0, 2, 3}, keys, counters, pool), "2 numbers for each key");
}

}  // namespace shoal::count_min_test
