// Whole rows: pulled with their state, and changed by what steps in copies of them have added.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "base/noise.h"
#include "batch/key_batch.h"
#include "cache/local_steps.h"
#include "check.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "tier/tier.h"

namespace shoal::whole_rows_test {
namespace {

using Params = std::map<std::string, double>;

struct Kind {
  const char* optimizer;
  Params params;
  std::size_t dim;
  Dtype dtype = Dtype::kFloat32;
};

const std::vector<Kind> kKinds = {
    {"SGD", {{"lr", 0.1}, {"weight_decay", 0.01}}, 3},
    {"Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.1}, {"weight_decay", 0.0}}, 16},
    {"Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.0}, {"weight_decay", 0.0}, {"clip_norm", 0.5}}, 4},
    {"RowWiseAdagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"weight_decay", 0.0}, {"decoupled", 0.0}}, 8},
    {"FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}}, 1},
    {"FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}}, 17},
    {"GroupFTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.01}, {"l2", 0.1}, {"l21", 0.1}, {"n0", 0.0}}, 4},
    {"Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.1}, {"weight_decay", 0.0}}, 4, Dtype::kBfloat16},
};

TableSpec spec_of(const Kind& kind) {
  return {.dim = kind.dim,
          .dtype = kind.dtype,
          .optimizer = Optimizer(kind.optimizer, kind.params),
          .init = Init("Uniform", 0.1, 4),
          .seed = 1};
}

SlotSlices slices(const KeyBatch& batch) { return {batch.hashes(), batch.offsets()}; }

std::vector<float> whole(const Shard& shard, const KeyBatch& batch) {
  std::vector<float> rows(batch.size() * shard.rows().floats());
  shard.pull_whole(slices(batch), rows);
  return rows;
}

std::vector<float> numbers(std::mt19937_64& random, std::size_t count) {
  std::vector<float> some(count);
  std::normal_distribution<float> normal;
  for (float& x : some) {
    x = normal(random);
  }
  return some;
}

TEST(whole_rows_are_their_columns_and_their_state) {
  std::mt19937_64 random(3);
  ThreadPool pool(2);
  for (const Kind& kind : kKinds) {
    const Slots cut(8);
    Shard shard(spec_of(kind), cut, pool);
    const std::vector<std::uint64_t> keys{0, 5, ~std::uint64_t{0}, 77, 1234567};
    const KeyBatch batch(keys, cut, pool);
    const KeyBatch some(std::vector<std::uint64_t>{5, 77}, cut, pool);
    for (int i = 0; i < 3; ++i) {
      shard.push(slices(some), numbers(random, some.size() * kind.dim));
    }
    const std::vector<float> rows = whole(shard, batch);
    const std::size_t floats = shard.rows().floats();
    for (std::size_t k = 0; k < shard.rows().columns() + (shard.rows().has_row_state() ? 1 : 0); ++k) {
      const std::size_t width = k == shard.rows().columns() ? 1 : kind.dim;
      std::vector<float> column(batch.size() * width);
      shard.state(slices(batch), k, column);
      for (std::size_t r = 0; r < batch.size(); ++r) {
        for (std::size_t e = 0; e < width; ++e) {
          CHECK_EQ(rows[r * floats + k * kind.dim + e], column[r * width + e]);
        }
      }
    }
    CHECK_EQ(shard.size(), 2U);  // a pull creates nothing
  }
}

// Two tables with equal rows; steps are made in copies of the rows of one, and their changes pushed to it.
// The other gets the gradients: both have the same rows up to rounding.
TEST(changes_of_local_steps_are_what_the_same_steps_change_in_a_table) {
  std::mt19937_64 random(5);
  ThreadPool pool(1);
  for (const Kind& kind : kKinds) {
    const Slots cut(16);
    Shard stepped(spec_of(kind), cut, pool);
    Shard changed(spec_of(kind), cut, pool);
    LocalSteps steps(kind.dim, Optimizer(kind.optimizer, kind.params));
    const std::size_t floats = changed.rows().floats();
    CHECK_EQ(steps.floats(), floats);
    std::vector<std::uint64_t> keys(60);
    for (std::size_t round = 0; round < 6; ++round) {
      for (std::uint64_t& key : keys) {
        key = random() % 100;
      }
      const KeyBatch batch(keys, cut, pool);
      const std::vector<float> before = whole(changed, batch);
      std::vector<float> copies = before;
      std::vector<std::byte*> rows;
      for (std::size_t r = 0; r < batch.size(); ++r) {
        rows.push_back(reinterpret_cast<std::byte*>(copies.data() + r * floats));
      }
      for (int i = 0; i < 4; ++i) {
        std::vector<float> grads = numbers(random, batch.size() * kind.dim);
        std::fill_n(grads.begin(), kind.dim, 0.0F);  // leaves its row as it is
        grads[kind.dim] = i == 2 ? std::numeric_limits<float>::quiet_NaN() : grads[kind.dim];
        CHECK_EQ(steps.step(rows, batch.hashes(), grads.data()), i == 2 ? 1U : 0U);
        stepped.push(slices(batch), grads);
      }
      std::vector<float> changes = copies;
      for (std::size_t i = 0; i < changes.size(); ++i) {
        changes[i] -= before[i];
      }
      changed.push_whole(slices(batch), changes);
      const std::vector<float> ours = whole(changed, batch);
      const std::vector<float> theirs = whole(stepped, batch);
      const double bound = kind.dtype == Dtype::kFloat32 ? 1e-5 : 0.2;
      for (std::size_t i = 0; i < ours.size(); ++i) {
        CHECK_NEAR(ours[i], theirs[i], bound * (1 + std::abs(static_cast<double>(theirs[i]))));
      }
      std::vector<float> weights(batch.size() * kind.dim);
      std::vector<float> pulled(weights.size());
      std::vector<float> rest = ours;
      rows.clear();
      for (std::size_t r = 0; r < batch.size(); ++r) {
        rows.push_back(reinterpret_cast<std::byte*>(rest.data() + r * floats));
      }
      steps.weights(rows, weights.data());
      changed.pull(slices(batch), pulled);
      CHECK(weights == pulled);
    }
    CHECK_EQ(changed.verify(), "");
  }
}

// Narrow rows are stepped as columns of a block.
TEST(local_steps_of_narrow_rows_have_the_bits_of_steps_in_place) {
  std::mt19937_64 random(11);
  for (const Kind& kind : kKinds) {
    for (const std::size_t dim : {1U, 2U, 7U}) {
      const Optimizer optimizer(kind.optimizer, kind.params);
      LocalSteps steps(dim, optimizer);
      const std::size_t count = 3 * LocalSteps::kBlock - 5;
      std::vector<float> ours = numbers(random, count * steps.floats());
      for (float& x : ours) {
        x = std::abs(x);  // state is
      }
      std::vector<float> theirs = ours;
      std::vector<float> scratch(steps.floats());
      std::vector<std::uint64_t> hashes(count);
      std::ranges::generate(hashes, random);
      const auto rows_of = [&](std::vector<float>& rows) {
        std::vector<std::byte*> pointers;
        for (std::size_t r = 0; r < count; ++r) {
          pointers.push_back(reinterpret_cast<std::byte*>(rows.data() + r * steps.floats()));
        }
        return pointers;
      };
      for (std::uint64_t number = 1; number < 5; ++number) {
        std::vector<float> grads = numbers(random, count * dim);
        std::fill_n(grads.begin(), dim, 0.0F);
        grads[dim] = std::numeric_limits<float>::infinity();
        grads[2 * dim] = 3e38F;  // too large a step for some rules
        const std::size_t dropped = steps.step(rows_of(ours), hashes, grads.data());
        Clip clip = optimizer.clip();
        clip.apply({.rows = count, .dim = dim, .grads = grads.data()});
        grads[dim] = std::numeric_limits<float>::infinity();
        PrefetchCursor none;
        std::size_t expected = 0;
        std::visit(
            [&](const auto& rule) {
              if constexpr (requires { rule.kAddsUp; }) {
                expected = rule.step(InPlace{.rows = rows_of(theirs),
                                             .dim = dim,
                                             .grads = grads.data(),
                                             .hashes = hashes.data(),
                                             .noise = step_noise(LocalSteps::kSeed, number),
                                             .step = number,
                                             .scratch = scratch.data(),
                                             .ahead = &none});
              }
            },
            optimizer.rule());
        CHECK_EQ(dropped, expected);
        CHECK(std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST(changes_that_would_spoil_a_row_leave_it_and_are_counted) {
  ThreadPool pool(1);
  for (const Kind& kind : kKinds) {
    const Slots cut(8);
    Shard shard(spec_of(kind), cut, pool);
    const KeyBatch batch(std::vector<std::uint64_t>{1, 2, 3}, cut, pool);
    std::mt19937_64 random(1);
    shard.push(slices(batch), numbers(random, 3 * kind.dim));
    const std::vector<float> before = whole(shard, batch);
    const std::size_t floats = shard.rows().floats();
    std::vector<float> changes(3 * floats, 0.0F);
    changes[0] = std::numeric_limits<float>::infinity();
    changes[floats] = std::numeric_limits<float>::quiet_NaN();
    const bool has_state = floats > kind.dim;
    changes[3 * floats - 1] = has_state ? -1e9F : 0.0F;
    shard.push_whole(slices(batch), changes);
    CHECK(whole(shard, batch) == before);
    CHECK_EQ(shard.stats().nonfinite_rows, has_state ? 3U : 2U);
  }
}

TEST(rules_whose_changes_do_not_add_up_are_refused) {
  ThreadPool pool(1);
  const Slots cut(8);
  const KeyBatch batch(std::vector<std::uint64_t>{1, 2, 3}, cut, pool);
  const Params adam{{"lr", 0.1},   {"b1", 0.9},           {"b2", 0.999},
                    {"eps", 1e-8}, {"weight_decay", 0.0}, {"per_row_step", 0.0}};
  Shard shard(spec_of({.optimizer = "Adam", .params = adam, .dim = 2}), cut, pool);
  const std::vector<float> changes(3 * shard.rows().floats());
  CHECK_THROWS(shard.push_whole(slices(batch), changes), "do not add up");
  CHECK_EQ(shard.size(), 0U);
  CHECK_THROWS(LocalSteps(2, Optimizer("Adam", adam)), "Adam");
  CHECK_THROWS(
      LocalSteps(
          2, Optimizer("SGD", {{"lr", 0.1}, {"weight_decay", 0.0}, {"schedule", 1}, {"schedule_warmup", 9}})),
      "SGD");
  CHECK_THROWS(LocalSteps(4096, Optimizer("Adagrad", kKinds[1].params)), "4096");
  Shard plain(spec_of(kKinds[0]), cut, pool);
  CHECK_THROWS(plain.push_whole(slices(batch), std::vector<float>(8)), "changes must be");
}

TEST(a_tiered_table_adds_changes_as_one_in_memory_does) {
  std::mt19937_64 random(9);
  ThreadPool pool(2);
  for (const Kind& kind : kKinds) {
    const Slots cut(32);
    Shard plain(spec_of(kind), cut, pool);
    Shard tiered(spec_of(kind), cut, pool);
    tiered.set_source(std::make_unique<Tier>(tiered, "/tmp", std::size_t{1} << 20U));
    for (int round = 0; round < 8; ++round) {
      std::vector<std::uint64_t> keys(3000);
      for (std::uint64_t& key : keys) {
        key = random() % 20000;
      }
      const KeyBatch batch(keys, cut, pool);
      std::vector<float> changes = numbers(random, batch.size() * plain.rows().floats());
      for (float& x : changes) {
        x = std::abs(x);  // state grows
      }
      CHECK(whole(plain, batch) == whole(tiered, batch));
      CHECK_EQ(plain.push_whole(slices(batch), changes), tiered.push_whole(slices(batch), changes));
      CHECK(whole(plain, batch) == whole(tiered, batch));
    }
    CHECK(reduce(plain, Function::kDigest, {}, 0, 32) == reduce(tiered, Function::kDigest, {}, 0, 32));
  }
}

}  // namespace
}  // namespace shoal::whole_rows_test
