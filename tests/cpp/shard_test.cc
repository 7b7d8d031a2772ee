// Shard: requests compared with a plain map, equal bits for any split and number of threads, concurrent
// callers, forks.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "shard/shard.h"

namespace shoal::shard_test {
namespace {

TableSpec sgd(std::size_t dim, double lr, const char* init = "Zeros", double parameter = 0,
              Dtype dtype = Dtype::kFloat32) {
  return {.dim = dim,
          .dtype = dtype,
          .optimizer = Optimizer("SGD", {{"lr", lr}, {"weight_decay", 0.0}}),
          .init = Init(init, parameter, 4),
          .seed = 1};
}

TableSpec ftrl() {
  return {
      .dim = 1,
      .dtype = Dtype::kFloat32,
      .optimizer = Optimizer("FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}}),
      .init = Init("Zeros", 0, 0),
      .seed = 1};
}

struct Store {
  Store(const TableSpec& spec, std::size_t slots, std::size_t threads, Locks locks = Locks::kBySlot)
      : pool(threads), cut(slots), shard(spec, cut, pool, locks) {}

  std::vector<float> pull(const std::vector<std::uint64_t>& keys) {
    const KeyBatch batch(keys, cut, pool);
    const std::size_t dim = shard.rows().dim();
    std::vector<float> unique(batch.size() * dim);
    std::vector<float> rows(keys.size() * dim);
    shard.pull({batch.hashes(), batch.offsets()}, unique);
    batch.expand(unique, dim, rows, pool);
    return rows;
  }
  void push(const std::vector<std::uint64_t>& keys, const std::vector<float>& grads) {
    const KeyBatch batch(keys, cut, pool);
    const std::size_t dim = shard.rows().dim();
    std::vector<float> sums(batch.size() * dim);
    batch.sum(grads, dim, sums, pool);
    shard.push({batch.hashes(), batch.offsets()}, sums);
  }
  std::size_t erase(const std::vector<std::uint64_t>& keys) {
    const KeyBatch batch(keys, cut, pool);
    return shard.erase({batch.hashes(), batch.offsets()});
  }

  ThreadPool pool;
  Slots cut;
  Shard shard;
};

std::vector<std::uint64_t> draw_keys(std::mt19937_64& random, std::size_t n, std::uint64_t among) {
  std::vector<std::uint64_t> keys(n);
  for (auto& key : keys) {
    key = random() % among;
    if (key == 1) {
      key = ~std::uint64_t{0};
    }
    if (key % 3 == 2) {
      key = unmix(~std::uint64_t{0} - key);  // neighbours at the end of the last slot
    }
  }
  return keys;
}

TEST(pushes_and_erasures_agree_with_a_map_for_every_cut_and_number_of_threads) {
  struct Kind {
    std::size_t slots;
    std::size_t dim;
    Locks locks;
  };
  for (const auto& [slots, dim, locks] :
       {Kind{2, 2, Locks::kBySlot}, Kind{64, 2, Locks::kOne}, Kind{4096, 2, Locks::kBySlot},
        Kind{2, 16, Locks::kBySlot}, Kind{64, 17, Locks::kBySlot}, Kind{1024, 16, Locks::kOne}}) {
    for (const std::size_t threads : {1UL, 3UL}) {
      Store store(sgd(dim, 0.25), slots, threads, locks);
      std::map<std::uint64_t, std::vector<float>> rows;
      std::mt19937_64 random(slots);
      for (int phase = 0; phase < check::rounds(12); ++phase) {
        const auto keys = draw_keys(random, 6000, 3000);
        std::vector<float> grads(dim * keys.size());
        for (std::size_t i = 0; i < keys.size(); ++i) {
          std::vector<float>& row = rows[keys[i]];
          row.resize(dim);
          for (std::size_t e = 0; e < dim; ++e) {
            grads[dim * i + e] = static_cast<float>(static_cast<int>(random() % 9) - 4);
            row[e] -= 0.25F * grads[dim * i + e];  // quarters: exact in any order
          }
        }
        store.push(keys, grads);
        if (phase % 3 == 2) {
          const auto gone = draw_keys(random, 2000, 3000);
          std::size_t count = 0;
          for (const std::uint64_t key : gone) {
            count += rows.erase(key);
          }
          CHECK_EQ(store.erase(gone), count);
        }
        CHECK_EQ(store.shard.verify(), "");
        CHECK_EQ(store.shard.size(), rows.size());
        const auto asked = draw_keys(random, 5000, 3500);
        const auto got = store.pull(asked);
        for (std::size_t i = 0; i < asked.size(); ++i) {
          const auto found = rows.find(asked[i]);
          for (std::size_t e = 0; e < dim; ++e) {
            CHECK_EQ(got[dim * i + e], found == rows.end() ? 0.0F : found->second[e]);
          }
        }
        CHECK_EQ(store.shard.size(), rows.size());  // a pull creates nothing
      }
    }
  }
}

// Two slots and batches of several runs with few or many new keys: rows and their memory move while the next
// runs are in progress. One table is read by unique keys, the other by input keys, with row locations of any
// earlier time.
TEST(rows_as_given_and_where_they_stood_change_no_bits) {
  TableSpec clipped = ftrl();
  clipped.optimizer = Optimizer(
      "FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}, {"clip_norm", 0.5}});
  const std::vector<TableSpec> specs{
      ftrl(),
      clipped,
      sgd(3, 0.25, "Normal", 0.5, Dtype::kBfloat16),
      sgd(16, 0.25, "Uniform", 0.5),
      {.dim = 16,
       .dtype = Dtype::kFloat32,
       .optimizer = Optimizer("Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.0}, {"weight_decay", 0.0}}),
       .init = Init("Zeros", 0, 0),
       .seed = 1},
      sgd(20, 0.25)};
  for (const TableSpec& spec : specs) {
    for (const auto& [slots, threads, locks] :
         {std::tuple{2UL, 1UL, Locks::kBySlot}, {64UL, 3UL, Locks::kBySlot}, {1024UL, 2UL, Locks::kOne}}) {
      Store plain(spec, slots, threads, locks);
      Store twin(spec, slots, threads, locks);
      const std::size_t dim = spec.dim;
      std::mt19937_64 random(slots);
      struct Known {
        std::vector<std::uint64_t> keys;
        KeyBatch batch;
        RowLocations locations;
      };
      std::vector<std::unique_ptr<Known>> all;
      for (int phase = 0; phase < check::rounds(40); ++phase) {
        if (all.size() < 5) {
          auto keys = draw_keys(random, 1 + random() % 6000, phase < 20 ? 3000 : 20'000);
          auto batch = KeyBatch(keys, twin.cut, twin.pool);
          const auto hashes = batch.hashes();
          all.push_back(
              std::make_unique<Known>(Known{std::move(keys), std::move(batch), RowLocations(hashes)}));
        }
        Known& known = *all[random() % all.size()];
        const SlotSlices slices{known.batch.hashes(), known.batch.offsets()};
        std::vector<float> rows(known.keys.size() * dim);
        switch (random() % 6) {
          case 0:
            twin.shard.locate(slices, known.locations);
            continue;
          case 1:
            CHECK(plain.erase(known.keys) == twin.shard.erase(slices));
            continue;
          case 2: {
            std::vector<float> unique(known.batch.size() * dim);
            twin.shard.pull(slices, unique, &known.locations);
            known.batch.expand(unique, dim, rows, twin.pool);
            CHECK(rows == plain.pull(known.keys));
            continue;
          }
          case 3:
            twin.shard.pull_per_key(known.batch, rows, &known.locations);
            CHECK(rows == plain.pull(known.keys));
            continue;
          default:
            for (auto& g : rows) {
              g = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
            }
            rows[0] = phase % 7 == 0 ? std::numeric_limits<float>::infinity() : 0.0F;
            plain.push(known.keys, rows);
            twin.shard.push_per_key(known.batch, rows, {}, phase % 5 == 0 ? nullptr : &known.locations);
        }
        CHECK(twin.shard.verify().empty());
        if (phase % 8 == 7) {
          all.erase(all.begin());
        }
      }
      CHECK(twin.shard.size() == plain.shard.size() && twin.shard.step() == plain.shard.step());
      CHECK(twin.shard.stats().nonfinite_rows == plain.shard.stats().nonfinite_rows);
      for (std::size_t s = 0; s < slots; ++s) {
        std::vector<std::byte> ours;
        std::vector<std::byte> theirs;
        plain.shard.section(Slot{static_cast<std::uint32_t>(s)}, ours);
        twin.shard.section(Slot{static_cast<std::uint32_t>(s)}, theirs);
        CHECK(ours == theirs);
      }
    }
  }
}

TEST(rows_that_a_push_itself_moves_are_searched_again) {
  for (const std::size_t dim : {1UL, 16UL}) {
    Store plain(sgd(dim, 0.25), 2, 1);
    Store twin(sgd(dim, 0.25), 2, 1);
    std::mt19937_64 random(1);
    std::vector<std::uint64_t> keys(12000);
    std::generate(keys.begin(), keys.end(), random);
    const std::vector<std::uint64_t> old(keys.begin(), keys.begin() + 4000);
    for (Store* store : {&plain, &twin}) {
      store->push(old, std::vector<float>(old.size() * dim, 1.0F));
      store->push(old,
                  std::vector<float>(old.size() * dim, 1.0F));  // a slot that fills is created anew first
    }
    const KeyBatch batch(keys, twin.cut, twin.pool);
    RowLocations locations(batch.hashes());
    twin.shard.locate({batch.hashes(), batch.offsets()}, locations);
    const std::vector<float> grads(keys.size() * dim, 2.0F);
    plain.push(keys, grads);
    twin.shard.push_per_key(batch, grads, {}, &locations);
    CHECK(twin.shard.verify().empty());
    CHECK(twin.pull(keys) == plain.pull(keys));
  }
}

TEST(where_rows_are_is_refused_for_another_batch_and_forgotten_for_another_shard) {
  Store one(sgd(16, 0.25), 64, 1);
  const std::vector<std::uint64_t> keys{7, 3, 9};
  one.push(keys, std::vector<float>(3 * 16, 1.0F));
  const KeyBatch batch(keys, one.cut, one.pool);
  const KeyBatch other(keys, one.cut, one.pool);
  RowLocations locations(batch.hashes());
  one.shard.locate({batch.hashes(), batch.offsets()}, locations);
  std::vector<float> rows(3 * 16);
  CHECK_THROWS(one.shard.pull_per_key(other, rows, &locations), "another batch");
  CHECK_THROWS(one.shard.push_per_key(other, rows, {}, &locations), "another batch");
  Store two(sgd(16, 0.25, "Constant", 2.0), 64, 1);
  two.shard.push_per_key(batch, rows, {}, &locations);  // of the first store: not looked at
  two.shard.pull_per_key(batch, rows, &locations);
  CHECK(rows == std::vector<float>(3 * 16, 2.0F));
}

TEST(slots_that_grow_in_the_middle_of_a_batch_lose_no_row_of_it) {
  for (const std::size_t dim : {1UL, 64UL}) {
    Store store(sgd(dim, 1), 2, 1);
    std::map<std::uint64_t, float> rows;
    std::mt19937_64 random(dim);
    for (int step = 0; step < 60; ++step) {
      std::vector<std::uint64_t> keys;
      for (std::uint64_t k = 0; k < 700; ++k) {
        keys.push_back(k % (step % 2 == 0 ? 4 : 64) == 0 ? 1'000'000 + rows.size() + k : random() % 5000);
      }
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      for (const std::uint64_t key : keys) {
        rows[key] -= 1;
      }
      store.push(keys, std::vector<float>(keys.size() * dim, 1));
      CHECK_EQ(store.shard.verify(), "");
      CHECK_EQ(store.shard.size(), rows.size());
      std::vector<std::uint64_t> all;
      for (const auto& row : rows) {
        all.push_back(row.first);
      }
      const auto got = store.pull(all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        CHECK_EQ(got[i * dim], rows[all[i]]);
        CHECK_EQ(got[i * dim + dim - 1], rows[all[i]]);
      }
    }
  }
}

TEST(the_bits_are_the_same_for_every_cut_and_number_of_threads) {
  const auto run = [](std::size_t slots, std::size_t threads, Locks locks = Locks::kBySlot) {
    Store store(ftrl(), slots, threads, locks);
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    for (int t = 0; t < 8; ++t) {
      const auto keys = draw_keys(random, 20'000, 6000);
      std::vector<float> grads(keys.size());
      for (float& g : grads) {
        g = normal(random);
      }
      store.push(keys, grads);
    }
    return store.pull(draw_keys(random, 20'000, 7000));
  };
  const auto expected = run(1024, 1);
  CHECK(run(1024, 2) == expected);
  CHECK(run(2, 3) == expected);
  CHECK(run(16384, 4) == expected);
  CHECK(run(1024, 2, Locks::kOne) == expected);
}

TEST(an_unseen_key_reads_the_row_that_it_would_be_given) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    Store store(sgd(5, 0.5, "Normal", 0.3, dtype), 64, 1);
    const std::vector<std::uint64_t> keys{0, 7, ~std::uint64_t{0}};
    const auto before = store.pull(keys);
    CHECK_EQ(store.shard.size(), 0);
    store.push(keys, std::vector<float>(15, 0.0F));  // all zero: created, and every bit kept
    CHECK_EQ(store.shard.size(), 3);
    CHECK(store.pull(keys) == before);
    CHECK(std::any_of(before.begin(), before.end(), [](float w) { return w != 0; }));
  }
}

TEST(rows_that_would_not_be_finite_stay_whole_and_are_counted) {
  Store store(ftrl(), 64, 1);
  const std::vector<std::uint64_t> keys{1, 2, 3, 4, 5};
  store.push(keys, {1, 1, 1, 1, 1});
  const auto before = store.pull(keys);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  store.push(keys,
             {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf, 1e20F, 2.0F});  // 1e20^2 is not a float32
  const auto after = store.pull(keys);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK_EQ(after[i], before[i]);
  }
  CHECK(after[4] != before[4]);
  CHECK_EQ(store.shard.stats().nonfinite_rows, 4);
}

TEST(sections_restore_into_any_cut_and_wrong_ones_change_nothing) {
  Store store(ftrl(), 16, 1);
  std::mt19937_64 random(5);
  const auto keys = draw_keys(random, 5000, 4000);
  store.push(keys, std::vector<float>(keys.size(), 0.5F));
  const auto expected = store.pull(keys);
  for (const std::size_t slots : {2UL, 16UL, 1024UL}) {
    Store other(ftrl(), slots, 1);
    std::vector<std::byte> bytes;
    for (std::uint32_t s = 0; s < 16; ++s) {
      const std::size_t rows = store.shard.section(Slot{s}, bytes);
      other.shard.restore(rows, bytes);
    }
    CHECK_EQ(other.shard.verify(), "");
    CHECK_EQ(other.shard.size(), store.shard.size());
    CHECK(other.pull(keys) == expected);
  }
  Store empty(ftrl(), 16, 1);
  std::vector<std::byte> bytes;
  const std::size_t rows = store.shard.section(Slot{3}, bytes);
  CHECK(rows > 2);
  CHECK_THROWS(empty.shard.restore(rows + 1000, bytes), "does not hold");
  CHECK_THROWS(empty.shard.restore(std::numeric_limits<std::size_t>::max(), bytes), "does not hold");
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 8);
  CHECK_THROWS(empty.shard.restore(rows, bytes), "must ascend");
  CHECK_EQ(empty.shard.size(), 0);
}

TEST(of_a_section_that_reaches_over_several_slots_a_part_is_restored) {
  Store store(ftrl(), 4, 1);
  std::mt19937_64 random(6);
  const auto keys = draw_keys(random, 5000, 4000);
  store.push(keys, std::vector<float>(keys.size(), 0.5F));
  std::vector<std::unique_ptr<Store>> parts;
  const std::vector<std::size_t> borders{0, 5, 5, 6, 16};
  std::size_t restored = 0;
  for (std::size_t part = 0; part + 1 < borders.size(); ++part) {
    Store& mine = *parts.emplace_back(std::make_unique<Store>(ftrl(), 16, 1));
    std::vector<std::byte> bytes;
    for (std::uint32_t s = 0; s < 4; ++s) {
      const std::size_t rows = store.shard.section(Slot{s}, bytes);
      restored += mine.shard.restore(rows, bytes, borders[part], borders[part + 1]);
    }
    std::size_t own = 0;
    for (std::uint32_t s = 0; s < 16; ++s) {
      const std::size_t rows = mine.shard.section(Slot{s}, bytes);
      own += rows;
      CHECK_EQ(rows != 0, s >= borders[part] && s < borders[part + 1]);
    }
    CHECK_EQ(own, mine.shard.size());
    CHECK_EQ(mine.shard.verify(), "");
  }
  CHECK_EQ(restored, store.shard.size());
}

TEST(a_batch_that_is_cut_otherwise_is_refused) {
  Store store(ftrl(), 16, 1);
  ThreadPool pool(1);
  const std::vector<std::uint64_t> keys{1, 2};
  const KeyBatch batch(keys, Slots(64), pool);
  std::vector<float> rows(2);
  CHECK_THROWS(store.shard.pull({batch.hashes(), batch.offsets()}, rows), "64 slots");
}

void check_threads_at_once(std::size_t dim, Locks locks) {
  constexpr int kRounds = 40;
  Store store(sgd(dim, 0.5), 64, 2, locks);
  std::vector<std::uint64_t> keys(3000);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i;
  }
  const KeyBatch batch(keys, store.cut, store.pool);
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  std::atomic<bool> torn{false};
  const auto push = [&] {
    const std::vector<float> ones(keys.size() * dim, 1.0F);
    for (int i = 0; i < kRounds; ++i) {
      store.shard.push(slices, ones);
    }
  };
  const auto pull = [&] {
    std::vector<float> rows(keys.size() * dim);
    for (int i = 0; i < kRounds; ++i) {
      store.shard.pull(slices, rows);
      for (std::size_t r = 0; r < keys.size(); ++r) {
        for (std::size_t e = 1; e < dim; ++e) {
          torn = torn || rows[r * dim + e] != rows[r * dim];
        }
      }
    }
  };
  const auto others = [&] {  // keys of their own come and go meanwhile
    ThreadPool pool(1);
    std::vector<std::byte> bytes;
    for (int i = 0; i < kRounds / 4; ++i) {
      std::vector<std::uint64_t> strangers(500);
      for (std::size_t k = 0; k < strangers.size(); ++k) {
        strangers[k] = 1'000'000 + k * static_cast<std::size_t>(i + 1);
      }
      const KeyBatch mine(strangers, store.cut, pool);
      store.shard.push({mine.hashes(), mine.offsets()}, std::vector<float>(mine.size() * dim, 1.0F));
      store.shard.pause_writers();
      store.shard.section(Slot{5}, bytes);
      store.shard.resume_writers();
      store.shard.erase({mine.hashes(), mine.offsets()});
      store.shard.stats();
    }
  };
  {
    std::vector<std::thread> threads;
    for (const auto& work : std::vector<std::function<void()>>{push, push, pull, others}) {
      threads.emplace_back(work);
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
  CHECK(!torn);
  CHECK_EQ(store.shard.verify(), "");
  CHECK_EQ(store.shard.size(), keys.size());
  for (const float w : store.pull(keys)) {
    CHECK_EQ(w, -0.5F * 2 * kRounds);
  }
}

TEST(threads_at_once_lose_nothing_and_see_no_row_half_written) {
  check_threads_at_once(4, Locks::kBySlot);
  check_threads_at_once(16, Locks::kBySlot);
  check_threads_at_once(16, Locks::kOne);
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of a process with threads
TEST(a_child_after_a_fork_gets_an_error_and_ends_without_waiting) {
  auto store = std::make_unique<Store>(ftrl(), 64, 2);
  store->push({1, 2, 3}, {1, 1, 1});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang ends the child by a signal
    int code = 1;
    try {
      store->pull({1});
    } catch (const WrongProcessError&) {
      code = 0;
    }
    store.reset();
    _exit(code);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(store->shard.size(), 3);
}
#endif

}  // namespace
}  // namespace shoal::shard_test
