// Tables of int64, and the sums of what is pushed to them, compared with maps of whole numbers.

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "base/int64_pairs.h"
#include "base/threads.h"
#include "batch/key_batch.h"
#include "batch/merge.h"
#include "batch/summed_batch.h"
#include "check.h"
#include "shard/reductions.h"
#include "shard/shard.h"

namespace shoal::int64_test {

namespace {

using Row = std::vector<std::uint64_t>;
using Map = std::map<std::uint64_t, Row>;

// Halves that are a signed zero, a NaN, an infinity or a denormal as floats, and sums that wrap around.
std::uint64_t some_number(std::mt19937_64& random) {
  constexpr std::array<std::uint64_t, 9> kEdges = {
      0,          1,          ~std::uint64_t{0},  std::uint64_t{1} << 63U, (std::uint64_t{1} << 63U) - 1,
      0x80000000, 0x7fa00001, 0x7f80000000000000, 0x8000000000000001};
  return random() % 2 == 0 ? kEdges[random() % kEdges.size()] : random();
}

struct Input {
  std::vector<std::uint64_t> keys;
  std::vector<float> rows;
  Map sums;  // by hash
};

Input random_input(std::size_t n, std::size_t numbers, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Input input;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t key = random() % 4 == 0 ? ~(random() % 3) : random() % (n / 2 + 1);
    input.keys.push_back(key);
    Row& sum = input.sums.try_emplace(mix(key), numbers).first->second;
    for (std::size_t e = 0; e < numbers; ++e) {
      const std::uint64_t number = some_number(random);
      sum[e] += number;
      input.rows.resize(input.rows.size() + kInt64Floats);
      store_int64(number, &input.rows[input.rows.size() - kInt64Floats]);
    }
  }
  return input;
}

Map map_of(std::span<const std::uint64_t> hashes, std::span<const float> rows, std::size_t numbers) {
  Map map;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    Row& row = map[hashes[i]];
    for (std::size_t e = 0; e < numbers; ++e) {
      row.push_back(load_int64(&rows[(i * numbers + e) * kInt64Floats]));
    }
  }
  return map;
}

TableSpec spec_of(std::size_t numbers) {
  return {.dim = numbers * kInt64Floats,
          .dtype = Dtype::kFloat32,
          .optimizer = Optimizer("Add", {}),
          .init = Init("Zeros", 0, 0),
          .seed = 0};
}

}  // namespace

TEST(sums_of_integers_are_those_of_a_map_modulo_2_to_the_64) {
  for (const std::size_t threads : {1U, 3U}) {
    ThreadPool pool(threads);
    for (const std::size_t numbers : {1U, 2U, 3U, 4U, 8U, 150U}) {
      for (const std::size_t n : {0U, 1U, 700U, 20'000U}) {
        if (n * numbers > 200'000) {
          continue;
        }
        const Input input = random_input(n, numbers, n + numbers);
        const std::size_t dim = numbers * kInt64Floats;
        KeyBatchScratch scratch;
        const SummedBatch summed(input.keys, input.rows, dim, Slots(16), pool, scratch, false,
                                 Elements::kInt64Pairs);
        CHECK(map_of(summed.hashes(), summed.sums(), numbers) == input.sums);
        const KeyBatch batch(input.keys, Slots(16), pool);
        std::vector<float> sums(batch.size() * dim);
        batch.sum(input.rows, dim, sums, pool, Elements::kInt64Pairs);
        CHECK(map_of(batch.hashes(), sums, numbers) == input.sums);
        std::vector<std::uint64_t> hashes(3 * batch.size());
        std::vector<float> merged(3 * sums.size());
        MergeScratch room;
        const std::vector<SortedList> lists(3, {batch.hashes(), sums, {}});
        const std::size_t size =
            merge(lists, dim, pool, room, {hashes, merged, {}}, 1, Elements::kInt64Pairs);
        Map threefold = input.sums;
        for (auto& [hash, row] : threefold) {
          for (std::uint64_t& number : row) {
            number *= 3;
          }
        }
        CHECK(map_of(std::span(hashes).first(size), merged, numbers) == threefold);
      }
    }
  }
}

TEST(a_shard_adds_what_is_pushed_to_any_number) {
  ThreadPool pool(2);
  for (const std::size_t numbers : {1U, 2U, 3U, 7U, 40U}) {
    const std::size_t dim = numbers * kInt64Floats;
    Shard shard(spec_of(numbers), Slots(16), pool);
    Map expected;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const Input input = random_input(900, numbers, round);
      const KeyBatch batch(input.keys, Slots(16), pool);
      if (round % 2 == 0) {
        std::vector<float> sums(batch.size() * dim);
        batch.sum(input.rows, dim, sums, pool, Elements::kInt64Pairs);
        shard.push({batch.hashes(), batch.offsets()}, sums);
      } else {
        shard.push_per_key(batch, input.rows);
      }
      for (const auto& [hash, row] : input.sums) {
        Row& to = expected.try_emplace(hash, numbers).first->second;
        for (std::size_t e = 0; e < numbers; ++e) {
          to[e] += row[e];
        }
      }
    }
    Map found;
    Row totals(numbers);
    for (std::uint32_t slot = 0; slot < 16; ++slot) {
      std::vector<std::uint64_t> hashes;
      std::vector<float> rows;
      shard.read_slot(Slot{slot}, hashes, rows);
      found.merge(map_of(hashes, rows, numbers));
    }
    CHECK(found == expected);
    CHECK_EQ(shard.stats().nonfinite_rows, 0U);
    for (const auto& [hash, row] : expected) {
      for (std::size_t e = 0; e < numbers; ++e) {
        totals[e] += row[e];
      }
    }
    const auto sums = reduce(shard, Function::kSum, {}, 0, 16);
    CHECK_EQ(sums.size(), 16 * numbers);
    Row added(numbers);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      added[i % numbers] += std::bit_cast<std::uint64_t>(sums[i]);
    }
    CHECK(added == totals);
    CHECK_THROWS(reduce(shard, Function::kDecay, std::array{0.5}, 0, 16), "this table has int64");
  }
}

TEST(rows_of_integers_have_pairs_of_floats_and_no_other_rule) {
  ThreadPool pool(1);
  TableSpec odd = spec_of(2);
  odd.dim = 3;
  CHECK_THROWS(Shard(odd, Slots(16), pool), "take two floats: dim 3");
  TableSpec half = spec_of(2);
  half.dtype = Dtype::kFloat16;
  CHECK_THROWS(Shard(half, Slots(16), pool), "take two floats");
  CHECK_THROWS(Optimizer("Add", {{"clip_norm", 1.0}}), "takes no clip_value or clip_norm");
  const KeyBatch batch(std::vector<std::uint64_t>{7}, Slots(16), pool);
  std::vector<float> sums(3);
  CHECK_THROWS(batch.sum(sums, 3, sums, pool, Elements::kInt64Pairs), "dim must be even, got 3");
  MergeScratch room;
  CHECK_THROWS(merge({}, 2, pool, room, {}, 2, Elements::kInt64Pairs), "integers have no mean");
}

}  // namespace shoal::int64_test
