// A Shard with rules and a memory budget, with concurrent callers: mainly for the thread sanitizer. The
// meaning of the rules is tested from Python, by comparison with dicts.

#include "policy/lifecycle.h"

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "policy/budget.h"
#include "shard/shard.h"

namespace shoal::lifecycle_test {
namespace {

TableSpec ruled(std::size_t dim, const std::optional<NamedRule>& admit,
                const std::vector<NamedRule>& expire) {
  return {.dim = dim,
          .dtype = Dtype::kFloat32,
          .optimizer = Optimizer("SGD", {{"lr", 0.5}, {"weight_decay", 0.0}}),
          .init = Init("Zeros", 0, 0),
          .seed = 1,
          .lifecycle = Lifecycle(admit, expire)};
}

TEST(powers_are_products) {
  double product = 1;
  for (std::uint32_t clocks = 0; clocks < 200; ++clocks) {
    CHECK_NEAR(power(0.97, clocks), product, 1e-12);
    product *= 0.97;
  }
  CHECK_EQ(power(1, 0xffffffff), 1.0);
}

TEST(ages_are_differences_and_never_negative) {
  CHECK_EQ(age_at(5, 5), 0U);
  CHECK_EQ(age_at(5, 6), 0U);
  CHECK_EQ(age_at(1, 0xffffffff), 2U);
  CHECK_EQ(age_at(0xffffffff, 1), 0U);
}

TEST(rules_travel_as_numbers) {
  const std::vector<double> numbers{1, 9, 0, 2, 0.5, 0.25, 3, 0.125, 0, 4, 100, 1};
  const auto rules = Lifecycle::expiries(numbers);
  CHECK_EQ(rules.size(), 4U);
  CHECK_EQ(rules[0].clocks, 9U);
  CHECK_EQ(rules[1].decay, 0.5);
  CHECK_EQ(rules[2].floor, 0.125);
  CHECK(rules[3].frequent);
  CHECK_THROWS(Lifecycle::expiries(std::span(numbers).first(4)), "three numbers");
  CHECK_THROWS(Lifecycle::expiries(std::vector<double>{5, 0, 0}), "no expiry rule number");
  CHECK_THROWS(Lifecycle::expiries(std::vector<double>{1, 0.5, 0}), "whole number");
}

TEST(callers_at_once_leave_a_table_whole_and_within_its_budget) {
  const std::vector<std::pair<std::optional<NamedRule>, std::vector<NamedRule>>> all{
      {NamedRule{"AfterCount", {{"n", 2}, {"capacity", 4000}}}, {{"TimeToLive", {{"clocks", 3}}}}},
      {NamedRule{"AfterBloom", {{"n", 2}, {"capacity", 3000}, {"error", 0.1}, {"within", 5}}},
       {{"DecayedScore", {{"decay", 0.5}, {"floor", 0.2}}}}},
      {NamedRule{"WithProbability", {{"p", 0.5}, {"seed", 3}}},
       {{"MinNorm", {{"floor", 0.1}}}, {"MaxRows", {{"rows", 3000}, {"frequent", 1}}}}}};
  for (const auto& [admit, expire] : all) {
    for (const std::size_t dim : {std::size_t{1}, std::size_t{24}}) {
      constexpr std::uint64_t kBytes = 3U << 19U;  // a Bloom filter takes 1 MiB
      const Slots slots(16);
      Budget budget(slots, kBytes);
      ThreadPool pool(2);
      Shard shard(ruled(dim, admit, expire), slots, pool, Locks::kBySlot, &budget);
      std::atomic<std::size_t> refused{0};
      std::vector<std::thread> callers;
      for (unsigned t = 0; t < 3; ++t) {
        callers.emplace_back([&, t] {
          std::mt19937_64 random(t);
          ThreadPool own(1);
          for (std::uint32_t clock = 0; clock < check::rounds(30U); ++clock) {
            std::vector<std::uint64_t> keys(3000);
            for (auto& key : keys) {
              key = random() % (random() % 2 == 0 ? 500 : 50000);
            }
            KeyBatchScratch scratch;
            const KeyBatch batch(keys, slots, own, scratch);
            const SlotSlices slices{batch.hashes(), batch.offsets()};
            std::vector<float> rows(batch.size() * dim, 1.0F);
            std::vector<std::uint32_t> counts(batch.size());
            batch.counts(counts);
            try {
              shard.push(slices, rows, {.counts = counts, .clock = clock});
              if (clock % 5 == t) {
                shard.assign(slices, rows, clock);
              }
            } catch (const MemoryBudgetExceededError&) {
              ++refused;
            }
            shard.pull(slices, rows);
            if (clock % 7 == t) {
              shard.sweep(0, slots.count(), clock, {}, clock % 2 == 0);
            }
            if (clock % 11 == t) {
              shard.erase(slices);
            }
            CHECK(shard.stats().bytes <= kBytes);
          }
        });
      }
      for (std::thread& caller : callers) {
        caller.join();
      }
      CHECK_EQ(shard.verify(), "");
      CHECK(shard.stats().rows_created > 0);
      CHECK(refused < 30);
    }
  }
}

}  // namespace
}  // namespace shoal::lifecycle_test
