// KeyBatch and SummedBatch compared with a std::map that sorts, dedupes and keeps positions.

#include "batch/key_batch.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "base/mix.h"
#include "base/threads.h"
#include "batch/summed_batch.h"
#include "batch/unique_keys.h"
#include "check.h"

namespace shoal::key_batch_test {

namespace {

using Keys = std::vector<std::uint64_t>;

constexpr std::uint64_t kGreatest = ~std::uint64_t{0};

// Pools of 1, 2, 3 and 8 threads, started once.
std::vector<ThreadPool*> pools() {
  static ThreadPool one(1), two(2), three(3), eight(8);
  return {&one, &two, &three, &eight};
}

// So many keys that each of the threads whose results are compared has some: 16,384 at least.
constexpr std::size_t kMany = check::kIsSanitized ? 80'000 : 200'000;

// Those whose results are compared. A sanitizer sees as much with one of them, in a minute less.
std::vector<ThreadPool*> compared_pools() { return check::kIsSanitized ? std::vector{pools()[2]} : pools(); }

template <class T>
bool same(std::span<const T> a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Every array of the batch must be what the map says, for every number of threads.
void check_batch(const Keys& keys, std::size_t slot_count = 1024, bool mixed = false) {
  std::map<std::uint64_t, std::vector<std::uint32_t>> positions;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    positions[mixed ? keys[i] : mix(keys[i])].push_back(static_cast<std::uint32_t>(i));
  }
  const Slots slots(slot_count);
  Keys hashes, offsets(slot_count + 1);
  std::vector<std::uint32_t> order, group_offsets{0}, counts, inverse(keys.size());
  for (const auto& [hash, at] : positions) {
    for (const std::uint32_t position : at) {
      inverse[position] = static_cast<std::uint32_t>(hashes.size());
    }
    hashes.push_back(hash);
    order.insert(order.end(), at.begin(), at.end());
    group_offsets.push_back(static_cast<std::uint32_t>(order.size()));
    counts.push_back(static_cast<std::uint32_t>(at.size()));
    ++offsets[index_of(slots.of(hash)) + 1];
  }
  for (std::size_t s = 0; s < slot_count; ++s) {
    offsets[s + 1] += offsets[s];
  }
  KeyBatchScratch scratch;
  const auto check_batch = [&](const KeyBatch& batch) {
    CHECK(batch.verify());
    CHECK(batch.slots() == slots);
    CHECK_EQ(batch.size(), hashes.size());
    CHECK_EQ(batch.input_size(), keys.size());
    CHECK(same(batch.hashes(), hashes));
    CHECK(same(batch.inverse(), inverse));
    CHECK(same(batch.offsets(), offsets));
    CHECK(same(batch.order(), order));
    CHECK(same(batch.group_offsets(), group_offsets));
    std::vector<std::uint32_t> counted(batch.size());
    batch.counts(counted);
    CHECK(counted == counts);
  };
  // Rows whose sums depend on the order in which they are added up.
  const auto rows_of = [&](std::size_t dim) {
    std::vector<float> rows(keys.size() * dim);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<float>(i % 7 == 0 ? 1e16 : 1.0) * (i % 2 == 0 ? 1.0F : -0.1F);
    }
    return rows;
  };
  const auto check_sums = [&](std::size_t dim, const std::vector<float>& rows, const SummedBatch& batch) {
    CHECK(batch.slots() == slots);
    CHECK(same(batch.hashes(), hashes));
    CHECK(same(batch.offsets(), offsets));
    std::vector<float> sums;
    for (const auto& [hash, at] : positions) {
      for (std::size_t d = 0; d < dim; ++d) {
        auto sum = static_cast<double>(rows[at[0] * dim + d]);
        for (std::size_t k = 1; k < at.size(); ++k) {
          sum += static_cast<double>(rows[at[k] * dim + d]);
        }
        sums.push_back(static_cast<float>(sum));
      }
    }
    CHECK(same(batch.sums(), sums));
  };
  for (const std::size_t dim : {1UL, 3UL}) {
    const auto rows = rows_of(dim);
    for (ThreadPool* pool : mixed ? std::vector<ThreadPool*>{} : compared_pools()) {
      check_sums(dim, rows, SummedBatch(keys, rows, dim, slots, *pool, scratch));
    }
  }
  for (ThreadPool* pool : compared_pools()) {
    check_batch(mixed ? KeyBatch::of_hashes(keys, slots, *pool, scratch)
                      : KeyBatch(keys, slots, *pool, scratch));
    if (!mixed && !keys.empty()) {
      check_batch(KeyBatch(std::span(keys).first(keys.size() - 1), slots, *pool, scratch, keys.back()));
    }
  }
}

Keys random_keys(std::size_t n, std::uint64_t distinct, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Keys keys(n);
  for (auto& key : keys) {
    key = random() % distinct;
  }
  return keys;
}

// Few keys make up most of the batch, as in a click log: key k with a weight of about 1 / k.
Keys zipf_keys(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Keys keys(n);
  for (auto& key : keys) {
    key = std::uint64_t{1} << (random() % 40U);
    key += random() % key;
  }
  return keys;
}

// Keys whose hashes agree in their top `bits`.
Keys colliding_keys(std::size_t n, unsigned bits, std::uint64_t distinct, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::uint64_t top = random() >> (64U - bits) << (64U - bits);
  Keys keys(n);
  for (auto& key : keys) {
    key = unmix(top | (random() % distinct) >> (distinct >> (64U - bits) == 0 ? 0U : bits));
  }
  return keys;
}

}  // namespace

TEST(an_empty_batch_has_empty_slots) {
  check_batch({});
  check_batch({}, 2);
}

TEST(the_least_and_the_greatest_key_are_keys_like_any_other) {
  check_batch({0});
  check_batch({kGreatest});
  check_batch({kGreatest, 0, kGreatest, 0, 0});
  check_batch({unmix(0), unmix(kGreatest), unmix(0)});
}

TEST(the_least_and_the_greatest_hash_lie_in_the_first_and_the_last_slot) {
  KeyBatchScratch scratch;
  const KeyBatch batch = KeyBatch::of_hashes(Keys{kGreatest, 0}, Slots(4), *pools()[0], scratch);
  CHECK(same(batch.offsets(), Keys{0, 1, 1, 1, 2}));
}

TEST(a_batch_equals_a_map_at_every_awkward_length) {
  for (const std::size_t n :
       {1U, 2U, 7U, 47U, 48U, 49U, 50U, 255U, 256U, 385U, 1023U, 1024U, 1025U, 2047U, 2048U, 5000U}) {
    check_batch(random_keys(n, kGreatest, n));
    check_batch(random_keys(n, n, n), 2);
    check_batch(random_keys(n, 3, n), Slots::kMax);
  }
}

TEST(a_large_batch_equals_a_map) {
  check_batch(random_keys(kMany, kGreatest, 1));
  check_batch(random_keys(kMany, 50'000, 2));
  check_batch(random_keys(kMany, 10, 3), 2);
}

TEST(hot_keys_stay_in_order_of_occurrence) { check_batch(zipf_keys(kMany, 4)); }

TEST(a_batch_of_one_key_alone_is_one_hash) {
  for (const std::size_t n : {48UL, 49UL, 1000UL, kMany}) {
    check_batch(Keys(n, 12345));
  }
}

TEST(sorted_and_reversed_hashes_are_a_batch) {
  Keys hashes = random_keys(kMany, kGreatest, 5);
  std::sort(hashes.begin(), hashes.end());
  check_batch(hashes, 1024, true);
  std::reverse(hashes.begin(), hashes.end());
  check_batch(hashes, 1024, true);
  check_batch(hashes, 1024, false);
}

TEST(keys_chosen_so_that_their_hashes_share_their_top_bits_are_sorted_all_the_same) {
  for (const unsigned bits : {8U, 16U, 24U, 32U, 40U, 48U, 56U}) {
    for (const std::size_t n : {20UL, 100UL, 3000UL, kMany / 2}) {
      check_batch(colliding_keys(n, bits, kGreatest, bits + n));
      check_batch(colliding_keys(n, bits, 40, bits + n));
    }
  }
}

TEST(small_dense_hashes_are_sorted_all_the_same) {
  check_batch(random_keys(kMany / 2, 70'000, 6), 1024, true);
}

TEST(many_groups_that_are_each_badly_distributed_are_sorted_all_the_same) {
  Keys hashes = random_keys(kMany / 2, kGreatest, 7);
  for (auto& hash : hashes) {
    hash &= 0xff80'0000'0000'03ffU;  // random top and bottom, nothing between
  }
  check_batch(hashes, 1024, true);
}

TEST(keys_chosen_by_an_enemy_cost_a_few_passes_and_not_a_square) {
  // Insertion sort alone would need 1e6 * 1e6 / 4 moves here, minutes; ctest's limit stops that.
  Keys hashes(1'000'000);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    hashes[i] = hashes.size() - i;
  }
  KeyBatchScratch scratch;
  const KeyBatch batch = KeyBatch::of_hashes(hashes, Slots(1024), *pools()[0], scratch);
  CHECK_EQ(batch.size(), hashes.size());
  CHECK(batch.verify());
}

TEST(one_scratch_serves_batches_of_all_sizes) {
  KeyBatchScratch scratch;
  for (const std::size_t n : {100'000U, 3U, 0U, 70'000U, 200'000U, 1U}) {
    const Keys keys = random_keys(n, 50'000, n);
    const KeyBatch batch(keys, Slots(16), *pools()[1], scratch);
    CHECK(batch.verify());
    for (std::size_t i = 0; i < n; ++i) {
      CHECK_EQ(batch.hashes()[batch.inverse()[i]], mix(keys[i]));
    }
  }
}

TEST(a_batch_outlives_its_keys_and_its_move) {
  Keys keys{5, 6, 5};
  KeyBatch first(keys, Slots(2), *pools()[0]);
  keys.clear();
  const KeyBatch batch = std::move(first);
  CHECK(batch.verify());
  CHECK_EQ(batch.size(), 2);
  CHECK_EQ(batch.hashes()[batch.inverse()[2]], mix(5));
}

TEST(a_batch_knows_the_keys_that_it_was_made_of) {
  ThreadPool pool(2);
  for (const std::size_t n : {std::size_t{1}, std::size_t{5}, std::size_t{100'000}}) {
    auto keys = random_keys(n, n, 8);
    keys.front() = ~std::uint64_t{0};
    const KeyBatch batch(keys, Slots(64), pool);
    CHECK(batch.is_of(keys, pool));
    CHECK(!batch.is_of(std::span(keys).first(n - 1), pool));
    for (const std::size_t position : {std::size_t{0}, n / 2, n - 1}) {
      auto other = keys;
      other[position] ^= 1U;
      CHECK(!batch.is_of(other, pool));
    }
    std::rotate(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(n / 2), keys.end());
    CHECK(n == 1 || !batch.is_of(keys, pool));
  }
  CHECK(KeyBatch({}, Slots(64), pool).is_of({}, pool));
}

TEST(more_keys_than_places_fit_are_refused_before_one_is_read) {
  const std::uint64_t key = 0;
  const std::span<const std::uint64_t> many(&key, std::size_t{1} << 32U);
  CHECK_THROWS(KeyBatch(many, Slots(2), *pools()[0]), "4294967296");
}

namespace {

// In order of occurrence, in float64, rounded once.
std::vector<float> slow_sum(const KeyBatch& batch, const std::vector<float>& grads, std::size_t dim) {
  std::vector<double> sums(batch.size() * dim);
  std::vector<bool> seen(batch.size());
  for (std::size_t i = 0; i < batch.input_size(); ++i) {
    const std::size_t u = batch.inverse()[i];
    for (std::size_t d = 0; d < dim; ++d) {
      const auto grad = static_cast<double>(grads[i * dim + d]);
      sums[u * dim + d] = seen[u] ? sums[u * dim + d] + grad : grad;
    }
    seen[u] = true;
  }
  return {sums.begin(), sums.end()};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

// The keys come twice, the second time with opposite gradients of very different sizes: what remains of each
// sum is its rounding errors, so that any other order gives other bits.
void check_sum(const Keys& half, std::size_t dim, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Keys keys = half;
  keys.insert(keys.end(), half.begin(), half.end());
  std::vector<float> grads(keys.size() * dim);
  for (std::size_t i = 0; i < grads.size() / 2; ++i) {
    grads[i] = std::ldexp(static_cast<float>(random() % 2'000'001) - 1e6F, static_cast<int>(random() % 60));
    grads[i + grads.size() / 2] = -grads[i];
  }
  for (ThreadPool* pool : compared_pools()) {
    const KeyBatch batch(keys, Slots(1024), *pool);
    std::vector<float> sums(batch.size() * dim, -1.0F);
    batch.sum(grads, dim, sums, *pool);
    CHECK(same_bits(sums, slow_sum(batch, grads, dim)));
  }
}

}  // namespace

TEST(sums_have_the_bits_of_the_slow_sum_for_every_dim_and_number_of_threads) {
  for (const std::size_t dim : {1U, 2U, 7U, 16U, 64U, 255U, 256U, 257U, 600U}) {
    check_sum({}, dim, dim);
    check_sum({9}, dim, dim);
    check_sum(Keys(40, 9), dim, dim);
    check_sum(random_keys(2000, 700, dim), dim, dim);
    check_sum(zipf_keys(1000, dim), dim, dim);
  }
  check_sum(random_keys(150'000, 50'000, 8), 1, 8);
  check_sum(zipf_keys(150'000, 9), 1, 9);
  check_sum(zipf_keys(50'000, 9), 3, 9);
}

TEST(a_sum_is_rounded_once) {
  // In float32 1 + 2^-25 + ... stays 1; in float64 the four add up to a bit.
  const float small = std::ldexp(1.0F, -25);
  const KeyBatch batch(Keys(5, 1), Slots(2), *pools()[0]);
  std::vector<float> sum(1);
  batch.sum(std::vector<float>{1.0F, small, small, small, small}, 1, sum, *pools()[0]);
  CHECK_EQ(sum[0], 1.0F + std::ldexp(1.0F, -23));
}

TEST(a_gradient_that_occurs_once_keeps_its_bits) {
  const KeyBatch batch(Keys{1, 2}, Slots(2), *pools()[0]);
  for (const std::size_t dim : {1U, 3U}) {
    std::vector<float> sums(2 * dim);
    batch.sum(std::vector<float>(2 * dim, -0.0F), dim, sums, *pools()[0]);
    CHECK(same_bits(sums, std::vector<float>(2 * dim, -0.0F)));
  }
}

TEST(sums_and_counts_of_the_wrong_length_are_refused_before_anything_is_written) {
  const KeyBatch batch(Keys{1, 2, 1}, Slots(2), *pools()[0]);
  std::vector<float> sums(4, 7.0F);
  std::vector<std::uint32_t> counts(3, 7);
  CHECK_THROWS(batch.sum(std::vector<float>(5), 2, sums, *pools()[0]), "3 x 2, got 5");
  CHECK_THROWS(batch.sum(std::vector<float>(3), 1, sums, *pools()[0]), "2 x 1, got room for 4");
  CHECK_THROWS(batch.sum({}, 0, sums, *pools()[0]), "grads");
  CHECK_THROWS(batch.counts(counts), "room for 2 unique keys, got 3");
  CHECK(sums == std::vector<float>(4, 7.0F));
  CHECK(counts == std::vector<std::uint32_t>(3, 7));
}

TEST(expanding_gives_each_key_the_row_of_its_hash) {
  for (const std::size_t dim : {1U, 2U, 17U}) {
    for (const std::size_t n : {0U, 1U, 385U, 150'000U}) {
      const Keys keys = zipf_keys(n, n);
      for (ThreadPool* pool : compared_pools()) {
        const KeyBatch batch(keys, Slots(1024), *pool);
        std::vector<float> rows(batch.size() * dim), out(n * dim, -1.0F);
        for (std::size_t k = 0; k < rows.size(); ++k) {
          rows[k] = static_cast<float>(k);
        }
        batch.expand(rows, dim, out, *pool);
        for (std::size_t k = 0; k < out.size(); ++k) {
          CHECK_EQ(out[k], static_cast<float>(batch.inverse()[k / dim] * dim + k % dim));
        }
      }
    }
  }
  const KeyBatch batch(Keys{1, 2, 1}, Slots(2), *pools()[0]);
  std::vector<float> out(3);
  CHECK_THROWS(batch.expand(std::vector<float>(3), 1, out, *pools()[0]), "rows");
  CHECK_THROWS(batch.expand(std::vector<float>(2), 1, std::span(out).first(2), *pools()[0]), "out");
}

// ---- UniqueKeys -------------------------------------------------------------------------------------------

TEST(unique_keys_are_those_of_a_key_batch) {
  std::mt19937_64 random(17);
  const Slots slots(64);
  // Few keys, so many that tables grow, and all different; several parts; with a key at the end that is new
  // or is not.
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{700}, std::size_t{300'000}}) {
    for (const std::uint64_t different :
         {std::uint64_t{1}, std::uint64_t{900}, std::uint64_t{150'000}, kGreatest}) {
      Keys keys(n);
      std::generate(keys.begin(), keys.end(), [&] { return random() % different * 0x9e3779b97f4a7c15U; });
      for (const auto last : {std::optional<std::uint64_t>{}, std::optional<std::uint64_t>{kGreatest},
                              std::optional<std::uint64_t>{keys.empty() ? 0 : keys[0]}}) {
        for (ThreadPool* pool : compared_pools()) {
          KeyBatchScratch scratch;
          const KeyBatch sorted(keys, slots, *pool, scratch, last);
          const UniqueKeys unique(keys, slots, *pool, scratch, last);
          CHECK_EQ(unique.size(), sorted.size());
          CHECK(std::ranges::equal(unique.hashes(), sorted.hashes()));
          CHECK(std::ranges::equal(unique.inverse(), sorted.inverse()));
          CHECK(std::ranges::equal(unique.offsets(), sorted.offsets()));
        }
      }
    }
  }
}

TEST(unique_keys_may_be_small_in_part) {
  // Runs of small keys, which an array numbers, between runs with greater ones; zero and equal keys in both.
  std::mt19937_64 random(19);
  constexpr std::size_t kKeys = 300'000;
  Keys keys(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) {
    const bool is_small = i / 5'000 % 2 == 0 || random() % 2 == 0;
    keys[i] = is_small ? random() % 20'000 : random() % 100 << 14U;
  }
  keys[7] = 0;
  const Slots slots(64);
  for (const auto last : {std::optional<std::uint64_t>{}, std::optional<std::uint64_t>{keys[0]}}) {
    for (ThreadPool* pool : compared_pools()) {
      KeyBatchScratch scratch;
      const KeyBatch sorted(keys, slots, *pool, scratch, last);
      const UniqueKeys unique(keys, slots, *pool, scratch, last);
      CHECK(std::ranges::equal(unique.hashes(), sorted.hashes()));
      CHECK(std::ranges::equal(unique.inverse(), sorted.inverse()));
      CHECK(std::ranges::equal(unique.offsets(), sorted.offsets()));
    }
  }
}

TEST(unique_keys_that_meet_in_one_place_of_a_table_are_sorted) {
  // Hashes whose low bits are equal: without the sort, n^2 / 2 comparisons, minutes.
  constexpr std::size_t kKeys = 200'000;
  Keys keys(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) {
    keys[i] = unmix(static_cast<std::uint64_t>(i) << 32U);
  }
  for (ThreadPool* pool : compared_pools()) {
    KeyBatchScratch scratch;
    const UniqueKeys unique(keys, Slots(64), *pool, scratch);
    CHECK_EQ(unique.size(), kKeys);
    for (std::size_t i = 0; i < kKeys; ++i) {
      CHECK_EQ(unique.inverse()[i], i);
    }
  }
}

}  // namespace shoal::key_batch_test
