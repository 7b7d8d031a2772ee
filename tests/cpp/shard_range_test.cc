// Shards of ranges of slots: together they hold, answer and refuse what one shard of all slots does, bit by
// bit.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "shard/snapshot.h"

namespace shoal::shard_range_test {
namespace {

constexpr std::size_t kSlots = 16;
constexpr std::size_t kDim = 2;

TableSpec ruled() {
  return {.dim = kDim,
          .dtype = Dtype::kBfloat16,
          .optimizer = Optimizer("Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.1}, {"weight_decay", 0.0}}),
          .init = Init("Uniform", 0.5, 4),
          .seed = 1,
          .lifecycle =
              Lifecycle(NamedRule{"AfterCount", {{"n", 2}, {"capacity", 8000}}},
                        {{"TimeToLive", {{"clocks", 3}}}, {"MaxRows", {{"rows", 900}, {"frequent", 0}}}})};
}

// Shards of ranges, and their budgets.
struct Ranges {
  Ranges(const std::vector<std::size_t>& bounds, std::uint64_t bytes) {
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      budgets.push_back(std::make_unique<Budget>(slots, bytes, bounds[i], bounds[i + 1]));
      shards.push_back(std::make_unique<Shard>(ruled(), slots, pool, Locks::kOne, budgets.back().get(),
                                               bounds[i], bounds[i + 1]));
    }
  }

  // use(shard, its part of the batch, first hash, number of hashes)
  template <class Use>
  void each(const KeyBatch& batch, const Use& use) {
    for (const auto& shard : shards) {
      const auto offsets =
          batch.offsets().subspan(shard->first_slot(), shard->end_slot() - shard->first_slot() + 1);
      std::vector<std::uint64_t> own(offsets.begin(), offsets.end());
      for (std::uint64_t& offset : own) {
        offset -= offsets.front();
      }
      const auto hashes = batch.hashes().subspan(offsets.front(), own.back());
      use(*shard, SlotSlices{hashes, own}, offsets.front(), hashes.size());
    }
  }

  ThreadPool pool{1};
  Slots slots{kSlots};
  std::vector<std::unique_ptr<Budget>> budgets;
  std::vector<std::unique_ptr<Shard>> shards;
};

TEST(shards_of_ranges_have_the_bits_of_one_shard) {
  constexpr std::uint64_t kBytes = 2'000'000;
  for (const std::vector<std::size_t>& bounds :
       {std::vector<std::size_t>{0, 16}, {0, 5, 16}, {0, 1, 2, 4, 8, 15, 16}}) {
    std::mt19937_64 random(bounds.size());
    Ranges parts(bounds, kBytes);
    ThreadPool pool(1);
    const Slots slots(kSlots);
    Budget budget(slots, kBytes);
    Shard whole(ruled(), slots, pool, Locks::kOne, &budget);
    for (std::uint32_t clock = 0; clock < 30; ++clock) {
      std::vector<std::uint64_t> keys(random() % 3 == 0 ? 40 : 600);
      for (std::uint64_t& key : keys) {
        key = random() % 1500;
      }
      const KeyBatch batch(keys, slots, pool);
      std::vector<float> grads(batch.size() * kDim);
      for (float& grad : grads) {
        grad = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
      }
      const SlotSlices all{batch.hashes(), batch.offsets()};
      std::vector<float> expected(grads.size());
      std::vector<float> pulled(grads.size());
      std::vector<std::uint8_t> there(batch.size());
      std::vector<std::uint8_t> expected_there(batch.size());
      switch (random() % 8) {
        case 0: {
          std::size_t erased = 0;
          parts.each(batch, [&](Shard& shard, const SlotSlices& part, std::size_t, std::size_t) {
            erased += shard.erase(part);
          });
          CHECK_EQ(erased, whole.erase(all));
          break;
        }
        case 1:
          whole.assign(all, grads, clock);
          parts.each(batch, [&](Shard& shard, const SlotSlices& part, std::size_t first, std::size_t count) {
            shard.assign(part, std::span(grads).subspan(first * kDim, count * kDim), clock);
          });
          break;
        case 2: {
          const auto words = whole.sweep(0, kSlots, clock, {}, clock % 2 == 0);
          std::vector<std::uint64_t> sum(words.size());
          for (const auto& shard : parts.shards) {
            const auto some = shard->sweep(shard->first_slot(), shard->end_slot(), clock, {}, clock % 2 == 0);
            std::ranges::transform(sum, some, sum.begin(), std::plus<>());
          }
          CHECK(sum == words);
          break;
        }
        default:
          whole.push(all, grads, {.clock = clock});
          parts.each(batch, [&](Shard& shard, const SlotSlices& part, std::size_t first, std::size_t count) {
            shard.push(part, std::span(grads).subspan(first * kDim, count * kDim), {.clock = clock});
          });
      }
      whole.pull(all, expected);
      whole.contains(all, expected_there);
      parts.each(batch, [&](Shard& shard, const SlotSlices& part, std::size_t first, std::size_t count) {
        RowLocations locations(part.hashes);
        for (int again = 0; again < 2; ++again) {
          shard.pull(part, std::span(pulled).subspan(first * kDim, count * kDim), &locations);
        }
        shard.contains(part, std::span(there).subspan(first, count));
      });
      CHECK(pulled == expected);
      CHECK(there == expected_there);
      for (const auto& shard : parts.shards) {
        CHECK_EQ(shard->verify(), "");
        for (std::size_t s = shard->first_slot(); s < shard->end_slot(); ++s) {
          const Slot slot{static_cast<std::uint32_t>(s)};
          CHECK(shard->digest(slot) == whole.digest(slot));
        }
      }
    }
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    for (const auto& shard : parts.shards) {
      rows += shard->stats().rows;
      bytes += shard->stats().bytes;
    }
    CHECK(rows != 0);
    CHECK_EQ(rows, whole.stats().rows);
    CHECK_EQ(bytes, whole.stats().bytes);
  }
}

TEST(sections_of_a_table_are_restored_by_each_range_for_its_own_slots) {
  ThreadPool pool(1);
  const Slots slots(kSlots);
  Shard whole(ruled(), slots, pool);
  std::vector<std::uint64_t> keys(4000);
  std::mt19937_64 random(3);
  for (std::uint64_t& key : keys) {
    key = random() % 2000;
  }
  for (int times = 0; times < 2; ++times) {
    const KeyBatch batch(keys, slots, pool);
    whole.push({batch.hashes(), batch.offsets()}, std::vector<float>(batch.size() * kDim, 1.0F));
    std::ranges::for_each(keys, [&](std::uint64_t& key) { key = random() % 2000; });
  }
  CHECK(whole.size() > 400);
  Ranges parts({0, 3, 11, 16}, 8U << 20U);
  std::vector<std::size_t> rows_of_slots(kSlots);
  std::vector<std::byte> section;
  for (const auto& shard : parts.shards) {
    shard->reserve(slots, rows_of_slots);
  }
  for (std::uint32_t s = 0; s < kSlots; ++s) {
    const std::size_t rows = whole.section(Slot{s}, section);
    std::size_t restored = 0;
    for (const auto& shard : parts.shards) {
      restored += shard->restore(rows, section);
    }
    CHECK_EQ(restored, rows);
    whole.filter(Slot{s}, section);
    for (const auto& shard : parts.shards) {
      shard->restore_filter(slots, Slot{s}, section);
    }
  }
  for (const auto& shard : parts.shards) {
    Snapshot snapshot(*shard, 0);
    for (std::size_t s = shard->first_slot(); s < shard->end_slot(); ++s) {
      const Slot slot{static_cast<std::uint32_t>(s)};
      CHECK(shard->digest(slot) == whole.digest(slot));
      std::vector<std::byte> filter;
      whole.filter(slot, filter);
      const std::size_t rows = whole.section(slot, section);
      const Snapshot::Piece piece = snapshot.take(slot);
      CHECK_EQ(piece.rows, rows);
      CHECK(piece.section == section);
      CHECK(piece.filter == filter);
    }
    CHECK_THROWS(snapshot.take(Slot{static_cast<std::uint32_t>(shard->end_slot() % kSlots)}),
                 "there is no slot");
  }
}

TEST(a_shard_of_a_range_refuses_what_is_not_its_own) {
  Ranges parts({0, 3, 16}, 8U << 20U);
  Shard& last = *parts.shards[1];
  std::vector<std::byte> bytes;
  CHECK_THROWS(last.section(Slot{2}, bytes), "there is no slot 2");
  CHECK_THROWS(last.filter(Slot{16}, bytes), "there is no slot 16");
  CHECK_THROWS(last.digest(Slot{0}), "there is no slot 0");
  CHECK_THROWS(last.sweep(0, 16, 0, {}, true), "no such slots");
  CHECK_THROWS(reduce(last, Function::kSum, {}, 2, 16), "no such slots");
  CHECK_THROWS(transform_weights(last, 0, 4, [](std::span<float>) {}), "no such slots");
  const std::vector<std::uint64_t> offsets(kSlots + 1);
  CHECK_THROWS(last.erase({{}, offsets}), "cut into 16 slots, the store into 13");
  std::vector<std::uint64_t> keys(6000);
  for (std::size_t k = 0; k < keys.size(); ++k) {
    keys[k] = k;
  }
  // The budget of a slot is that of the same slot in a shard of all slots, and so is the refusal.
  constexpr std::uint64_t kBytes = 30'000 * kSlots;
  Ranges tight({0, 3, 16}, kBytes);
  Budget budget(tight.slots, kBytes);
  Shard whole(ruled(), tight.slots, tight.pool, Locks::kOne, &budget);
  for (std::uint64_t& key : keys) {
    key = unmix((std::uint64_t{5} << 60U) + mix(key) / kSlots);  // all in slot 5
  }
  const KeyBatch batch(keys, tight.slots, tight.pool);
  const std::vector<float> rows(batch.size() * kDim, 1.0F);
  const auto refusal_of = [&](const auto& assign) -> std::string {
    try {
      assign();
    } catch (const MemoryBudgetExceededError& error) {
      return error.what();
    }
    return {};
  };
  const std::string refusal = refusal_of([&] { whole.assign({batch.hashes(), batch.offsets()}, rows); });
  CHECK(refusal.find("more rows in slot 5: ") != std::string::npos);
  CHECK_EQ(refusal_of([&] {
             tight.each(batch, [&](Shard& shard, const SlotSlices& part, std::size_t, std::size_t count) {
               shard.assign(part, std::span(rows).first(count * kDim));
             });
           }),
           refusal);
}

}  // namespace
}  // namespace shoal::shard_range_test
