// Interactions compared with a plain implementation of the rule.

#include "kernel/interactions.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "check.h"

namespace shoal::interactions_test {

namespace {

struct Made {
  std::vector<std::int64_t> indptr;
  std::vector<std::uint64_t> keys;
  std::vector<float> values;
};

Made made(std::span<const std::uint64_t> pairs, const FieldedRows& rows) {
  Interactions interactions(pairs);
  Made to;
  to.indptr.resize(rows.indptr.size());
  interactions.count(rows, to.indptr);
  to.keys.resize(static_cast<std::size_t>(to.indptr.back()));
  to.values.resize(rows.values.empty() ? 0 : to.keys.size());
  interactions.write(rows, to.keys, to.values);
  return to;
}

}  // namespace

TEST(interactions_follow_the_rule) {
  std::mt19937_64 random(7);
  const std::vector<std::uint64_t> fields{0, 1, 5, ~std::uint64_t{0}, 77};
  const std::vector<std::uint64_t> pairs{0, 1, 5, 5, ~std::uint64_t{0}, 0, 1, 123, 0, 1};
  for (int round = 0; round < 50; ++round) {
    std::vector<std::int64_t> indptr{0};
    std::vector<std::uint64_t> keys;
    std::vector<float> values;
    std::vector<std::uint64_t> of;
    for (int row = 0; row < 20; ++row) {
      for (std::uint64_t n = random() % 9; n > 0; --n) {
        keys.push_back(random() % 3 == 0 ? random() % 4 : random());
        values.push_back(static_cast<float>(random() % 100) / 8.0F);
        of.push_back(fields[random() % fields.size()]);
      }
      indptr.push_back(static_cast<std::int64_t>(keys.size()));
    }
    Made want{{0}, {}, {}};
    for (std::size_t row = 0; row + 1 < indptr.size(); ++row) {
      const auto begin = static_cast<std::size_t>(indptr[row]);
      const auto end = static_cast<std::size_t>(indptr[row + 1]);
      for (std::size_t i = begin; i < end; ++i) {
        want.keys.push_back(keys[i]);
        want.values.push_back(values[i]);
      }
      for (std::size_t p = 0; p < pairs.size(); p += 2) {
        for (std::size_t i = begin; i < end; ++i) {
          for (std::size_t j = begin; j < end; ++j) {
            if (of[i] == pairs[p] && of[j] == pairs[p + 1] && (pairs[p] != pairs[p + 1] || i < j)) {
              const bool swap = pairs[p] == pairs[p + 1] && keys[j] < keys[i];
              want.keys.push_back(interaction_key(keys[swap ? j : i], keys[swap ? i : j]));
              want.values.push_back(values[i] * values[j]);
            }
          }
        }
      }
      want.indptr.push_back(static_cast<std::int64_t>(want.keys.size()));
    }
    const Made got = made(pairs, {indptr, keys, values, of});
    CHECK(got.indptr == want.indptr);
    CHECK(got.keys == want.keys);
    CHECK(got.values == want.values);
    CHECK(made(pairs, {indptr, keys, {}, of}).keys == want.keys);
    CHECK(made({}, {indptr, keys, values, of}).keys == keys);
  }
}

TEST(interactions_of_arrays_that_do_not_fit_are_refused) {
  const std::vector<std::int64_t> indptr{0, 2};
  const std::vector<std::uint64_t> two{1, 2};
  const std::vector<std::uint64_t> one{1};
  const std::vector<float> values{1.0F};
  const std::vector<std::int64_t> falls{0, 2, 1, 2};
  const std::vector<std::int64_t> late{1, 2};
  CHECK_THROWS(made(one, {indptr, two, {}, two}), "two fields each, got 1");
  CHECK_THROWS(made(two, {indptr, two, {}, one}), "a field for each of the 2 keys, got 1");
  CHECK_THROWS(made(two, {indptr, two, values, two}), "a value for each of the 2 keys, got 1");
  CHECK_THROWS(made(two, {indptr, one, {}, one}), "indptr must end with the number of keys, 1, got 2");
  CHECK_THROWS(made(two, {falls, two, {}, two}), "indptr falls");
  CHECK_THROWS(made(two, {late, two, {}, two}), "begin with 0");
}

TEST(interactions_of_one_huge_row_are_refused_before_anything_is_written) {
  const std::vector<std::uint64_t> keys(200'000, 1);
  std::vector<std::uint64_t> fields(200'000, 1);
  std::fill(fields.begin(), fields.begin() + 100'000, 2);
  const std::vector<std::int64_t> indptr{0, 200'000};
  CHECK_THROWS(made(std::vector<std::uint64_t>{1, 2}, {indptr, keys, {}, fields}),
               "the interactions of row 0 make more than 4294967296 features");
  CHECK_THROWS(made(std::vector<std::uint64_t>{2, 2}, {indptr, keys, {}, fields}), "row 0");
}

}  // namespace shoal::interactions_test
