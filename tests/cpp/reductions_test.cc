// Functions of a table: results of disjoint slots combine to the whole; calls concurrent with pushes and
// saves.

#include "shard/reductions.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "shard/shard_copy.h"

namespace shoal::reductions_test {
namespace {

TableSpec group(std::size_t dim) {
  return {
      .dim = dim,
      .dtype = Dtype::kFloat32,
      .optimizer = Optimizer(
          "GroupFTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"l21", 0.1}, {"n0", 0.0}}),
      .init = Init("Normal", 1.0, 4),
      .seed = 1};
}

void push(Shard& shard, std::uint64_t first, std::size_t n, float grad) {
  std::vector<std::uint64_t> keys(n);
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = first + i;
  }
  const KeyBatch batch(keys, shard.slots(), shard.pool());
  shard.push({batch.hashes(), batch.offsets()}, std::vector<float>(batch.size() * shard.rows().dim(), grad));
}

TEST(the_answers_of_two_halves_are_those_of_the_whole) {
  ThreadPool pool(3);
  Shard shard(group(3), Slots(16), pool);
  push(shard, 0, 5000, 0.5F);
  for (const auto& [function, parameters] : std::vector<std::pair<Function, std::vector<double>>>{
           {Function::kSum, {}},
           {Function::kNorm, {1.0}},
           {Function::kNorm, {std::numeric_limits<double>::infinity()}},
           {Function::kCount, {0.5}},
           {Function::kDigest, {}}}) {
    std::vector<double> halves = reduce(shard, function, parameters, 0, 5);
    const std::vector<double> more = reduce(shard, function, parameters, 5, 16);
    halves.insert(halves.end(), more.begin(), more.end());
    CHECK(halves == reduce(shard, function, parameters, 0, 16));
  }
  CHECK_EQ(reduce(shard, Function::kSum, {}, 4, 4).size(), 0);
  CHECK_THROWS(reduce(shard, Function::kSum, {}, 5, 17), "no such slots");
  CHECK_THROWS(reduce(shard, Function::kSum, {}, 5, 4), "no such slots");
}

TEST(a_change_of_some_slots_leaves_the_others) {
  ThreadPool pool(1);
  Shard shard(group(1), Slots(16), pool);
  push(shard, 0, 1000, 0.5F);
  const auto before = reduce(shard, Function::kNorm, std::array{1.0}, 0, 16);
  reduce(shard, Function::kDecay, std::array{0.5}, 3, 7);
  const auto after = reduce(shard, Function::kNorm, std::array{1.0}, 0, 16);
  for (std::size_t s = 0; s < 16; ++s) {
    CHECK_NEAR(after[s], (s >= 3 && s < 7 ? 0.5 : 1.0) * before[s], 1e-5 * before[s]);
    CHECK_EQ(after[s] == before[s], s < 3 || s >= 7);
  }
}

TEST(a_copy_of_a_shard_has_its_rate) {
  ThreadPool pool(1);
  const TableSpec spec{.dim = 1,
                       .dtype = Dtype::kFloat32,
                       .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
                       .init = Init("Zeros", 0, 0),
                       .seed = 1};
  const auto shard = std::make_shared<Shard>(spec, Slots(2), pool);
  CHECK(reduce(*shard, Function::kRate, std::array{0.25}, 1, 2) == std::vector<double>(1));
  push(*shard, 7, 1, -1.0F);
  CHECK_EQ(reduce(*shard, Function::kNorm, std::array{1.0}, 0, 1)[0] +
               reduce(*shard, Function::kNorm, std::array{1.0}, 1, 2)[0],
           0.25);
  shard->pause_writers();
  const ShardCopy copy(shard);
  shard->resume_writers();
  Shard restored(spec, Slots(2), pool);
  ByteReader in(copy.table(), "a copy");
  ShardCopy::restore(restored, in);
  CHECK_EQ(restored.rate(), 0.25);
}

TEST(a_frozen_shard_is_not_decayed_and_a_thawed_one_is_decayed_whole) {
  ThreadPool pool(2);
  Shard shard(group(2), Slots(16), pool);
  push(shard, 0, 2000, 0.5F);
  for (int round = 0; round < 20; ++round) {
    std::thread other([&] { reduce(shard, Function::kDecay, std::array{0.5}, 0, 16); });
    shard.pause_writers();
    const auto first = reduce(shard, Function::kNorm, std::array{1.0}, 0, 16);
    const auto second = reduce(shard, Function::kNorm, std::array{1.0}, 0, 16);
    shard.resume_writers();
    other.join();
    CHECK(first == second);
    const auto then = reduce(shard, Function::kNorm, std::array{1.0}, 0, 16);
    // All slots were decayed before the freeze, or none.
    const bool decayed = then == first;
    for (std::size_t s = 0; s < 16; ++s) {
      CHECK_NEAR(then[s], (decayed ? 1.0 : 0.5) * first[s], 1e-3 * first[s]);
    }
  }
}

TEST(questions_and_changes_run_beside_pushes) {
  ThreadPool pool(2);
  Shard shard(group(4), Slots(8), pool);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 60; ++i) {
        push(shard, 500 * t + 10 * i, 700, 0.25F);
      }
      stop = true;
    });
  }
  while (!stop) {
    reduce(shard, Function::kShrink, std::array{0.001}, 0, 8);
    CHECK_EQ(reduce(shard, Function::kTopK, std::array{5.0}, 0, 8).size() % 2, 0);
    reduce(shard, Function::kDecay, std::array{0.99}, 0, 8);
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK_EQ(shard.verify(), std::string());
}

}  // namespace
}  // namespace shoal::reductions_test
