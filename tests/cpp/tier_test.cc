// A tiered table against one in memory: equal rows after any trace, with little memory, damaged pages, a full
// disk and threads.

#include "tier/tier.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "batch/key_batch.h"
#include "check.h"
#include "endpoint/checkpoint_session.h"
#include "shard/reductions.h"
#include "shard/section_codec.h"
#include "shard/snapshot.h"
#include "tier/storage_error.h"
#include "tier/tier_memory.h"

namespace shoal::tier_test {
namespace {

const std::string kDirectory = std::filesystem::temp_directory_path();

TableSpec adagrad(std::size_t dim, Dtype dtype = Dtype::kFloat32) {
  return {.dim = dim,
          .dtype = dtype,
          .optimizer = Optimizer("Adagrad", {{"lr", 0.1}, {"eps", 1e-8}, {"n0", 0.0}, {"weight_decay", 0.0}}),
          .init = Init("Uniform", 0.1, 7),
          .seed = 3};
}

TableSpec ftrl() {
  return {
      .dim = 1,
      .dtype = Dtype::kFloat32,
      .optimizer = Optimizer("FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}}),
      .init = Init("Zeros", 0, 0),
      .seed = 1};
}

// Gives a shard a tier, with memory of its own or shared.
template <class Memory, class... Engine>
Tier& add_tier(Shard& shard, Memory& memory, Engine... engine) {
  auto tier = std::make_unique<Tier>(shard, kDirectory, memory, engine...);
  Tier& added = *tier;
  shard.set_source(std::move(tier));
  return added;
}

// A table in memory and a tiered one, which get the same calls.
struct Pair {
  Pair(const TableSpec& spec, std::size_t slots, std::size_t memory, std::size_t threads = 2,
       ReadQueue::Engine engine = ReadQueue::Engine::kBest)
      : pool(threads),
        plain(spec, Slots(slots), pool),
        tiered(spec, Slots(slots), pool),
        tier(add_tier(tiered, memory, engine)) {}

  KeyBatch batch(std::span<const std::uint64_t> keys) { return KeyBatch(keys, plain.slots(), pool); }
  static SlotSlices slices(const KeyBatch& batch) { return {batch.hashes(), batch.offsets()}; }

  void push(std::span<const std::uint64_t> keys, float grad) {
    const KeyBatch some = batch(keys);
    std::vector<float> grads(keys.size() * plain.rows().dim());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      grads[i] = grad * static_cast<float>(1 + i % 5);
    }
    CHECK_EQ(plain.push_per_key(some, grads), tiered.push_per_key(some, grads, {}, nullptr));
  }
  // A pull and a push that goes to the rows it has found.
  void step(std::span<const std::uint64_t> keys, float grad) {
    const KeyBatch some = batch(keys);
    RowLocations locations(some.hashes());
    std::vector<float> rows(some.size() * plain.rows().dim());
    std::vector<float> tiered_rows(rows.size());
    plain.pull(slices(some), rows);
    tiered.pull(slices(some), tiered_rows, &locations);
    CHECK(std::ranges::equal(std::as_bytes(std::span(rows)), std::as_bytes(std::span(tiered_rows))));
    for (float& row : rows) {
      row = grad - 0.1F * row;
    }
    plain.push(slices(some), rows);
    tiered.push(slices(some), rows, {}, nullptr, &locations);
  }
  void expect_equal() {
    CHECK_EQ(tiered.verify(), "");
    CHECK_EQ(plain.size(), tiered.size());
    CHECK(reduce(plain, Function::kDigest, {}, 0, plain.slots().count()) ==
          reduce(tiered, Function::kDigest, {}, 0, tiered.slots().count()));
    CHECK_EQ(tiered.verify(), "");
  }

  ThreadPool pool;
  Shard plain;
  Shard tiered;
  Tier& tier;
};

std::size_t ahead_bytes(Tier& tier) {
  const std::lock_guard turn(tier);
  return tier.ahead_bytes();
}

std::vector<std::uint64_t> range(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> keys(count);
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = first + i;
  }
  return keys;
}

std::vector<std::uint64_t> some_keys(std::mt19937_64& random, std::uint64_t below, std::size_t count) {
  std::vector<std::uint64_t> keys(count);
  for (std::uint64_t& key : keys) {
    key = random() % below;
    switch (random() % 64) {
      case 0:
        key = 0;
        break;
      case 1:
        key = std::numeric_limits<std::uint64_t>::max();
        break;
      case 2:
        key = unmix((std::uint64_t{5} << 61U) | key);  // colliding hashes
        break;
      default:
        break;
    }
  }
  return keys;
}

void run_trace(Pair& pair, std::uint64_t seed, std::uint64_t below, int steps) {
  std::mt19937_64 random(seed);
  std::printf("    seed %llu\n", static_cast<unsigned long long>(seed));
  const auto draw = [&] {
    return some_keys(random, below, random() % 4 == 0 ? random() % 3 : random() % 400);
  };
  auto next = draw();
  for (int i = 0; i < steps; ++i) {
    const auto keys = std::exchange(next, draw());
    for (const auto& ahead : {keys, next, draw()}) {  // of this call, of the next one, and of none
      if (random() % 3 == 0) {
        const KeyBatch later = pair.batch(ahead);
        pair.tiered.prefetch(Pair::slices(later));
      }
    }
    const KeyBatch batch = pair.batch(keys);
    const SlotSlices slices = Pair::slices(batch);
    const std::size_t dim = pair.plain.rows().dim();
    switch (random() % 10) {
      case 0: {
        CHECK_EQ(pair.plain.erase(slices), pair.tiered.erase(slices));
        break;
      }
      case 1: {
        const std::vector<float> weights(batch.size() * dim, 0.25F);
        pair.plain.assign(slices, weights);
        pair.tiered.assign(slices, weights, 0);
        break;
      }
      case 2: {
        std::vector<std::uint8_t> there(batch.size());
        std::vector<std::uint8_t> tiered_there(batch.size());
        pair.plain.contains(slices, there);
        pair.tiered.contains(slices, tiered_there);
        CHECK(there == tiered_there);
        break;
      }
      case 3: {
        std::vector<float> values(batch.size() * dim);
        std::vector<float> tiered_values(values.size());
        const std::size_t column = pair.plain.rows().columns() - 1;
        pair.plain.state(slices, column, values);
        pair.tiered.state(slices, column, tiered_values);
        CHECK(values == tiered_values);
        break;
      }
      case 4:
        if (random() % 8 == 0) {
          const std::array factor{0.5};
          CHECK(reduce(pair.plain, Function::kDecay, factor, 0, pair.plain.slots().count()) ==
                reduce(pair.tiered, Function::kDecay, factor, 0, pair.tiered.slots().count()));
        }
        break;
      case 5:
        pair.push(keys, 0.1F);
        break;
      default:
        pair.step(keys, 0.2F);
    }
    CHECK_EQ(pair.plain.size(), pair.tiered.size());
    if (i % 16 == 0) {
      pair.expect_equal();
    }
  }
  pair.expect_equal();
}

TEST(a_tiered_table_equals_one_in_memory_after_any_trace) {
  for (std::uint64_t seed = 1; seed <= check::rounds(3U); ++seed) {
    Pair wide(adagrad(16), 4, 96 << 10U);
    run_trace(wide, seed, 4000, check::rounds(200));
    CHECK(wide.tiered.tier_stats().value().merges > 0);
    CHECK(wide.tiered.tier_stats().value().misses > 0);
    CHECK(wide.tiered.tier_stats().value().prefetched > 100);
  }
  Pair narrow(ftrl(), 2, 32 << 10U);
  run_trace(narrow, 4, 6000, check::rounds(300));
  CHECK(narrow.tiered.tier_stats().value().misses > 0);
  Pair half(adagrad(3, Dtype::kFloat16), 8, 48 << 10U, 1, ReadQueue::Engine::kThreads);
  run_trace(half, 5, 5000, check::rounds(200));
  CHECK(half.tiered.tier_stats().value().misses > 0);
  CHECK(!half.tiered.tier_stats().value().is_async);
  Pair huge(adagrad(1500), 2, 4 << 20U);  // rows of more than a page
  run_trace(huge, 6, 600, check::rounds(60));
  CHECK(huge.tiered.tier_stats().value().misses > 0);
}

TEST_OF_ONE_THREAD(memory_stays_within_its_limit) {
  constexpr std::size_t kMemory = 512 << 10U;
  Pair pair(adagrad(16), 8, kMemory);
  for (std::uint64_t first = 0; first < 20000; first += 500) {
    pair.push(range(first, 500), 0.5F);
    CHECK(pair.tiered.tier_stats().value().memory_bytes <= kMemory);
  }
  pair.expect_equal();
  CHECK(pair.tiered.tier_stats().value().memory_bytes <= kMemory);
  CHECK_THROWS(pair.push(range(0, 5000), 0.5F), "does not fit in the 524288 bytes");
  CHECK_EQ(pair.tiered.verify(), "");
}

TEST_OF_ONE_THREAD(a_miss_takes_one_read_and_an_absent_key_hardly_any) {
  Pair pair(adagrad(16), 16, 2 << 20U);
  for (std::uint64_t first = 0; first < 60000; first += 2000) {
    pair.push(range(first, 2000), 0.5F);
  }
  std::mt19937_64 random(5);
  for (int i = 0; i < 100; ++i) {
    std::vector<std::uint64_t> keys(100);
    for (std::uint64_t& key : keys) {
      key = random() % 60000;
    }
    const KeyBatch batch = pair.batch(keys);
    std::vector<float> rows(batch.size() * 16);
    pair.tiered.pull(Pair::slices(batch), rows, nullptr);
  }
  const TierStats there = pair.tiered.tier_stats().value();
  CHECK(there.misses > 5000);
  CHECK(static_cast<double>(there.reads - there.absent_reads) <= 1.0 * static_cast<double>(there.misses));
  const KeyBatch absent = pair.batch(range(1U << 30U, 10000));
  std::vector<std::uint8_t> found(absent.size());
  pair.tiered.contains(Pair::slices(absent), found);
  CHECK_EQ(std::ranges::count(found, 1), 0);
  const TierStats after = pair.tiered.tier_stats().value();
  CHECK_EQ(after.absent - there.absent, 10000);
  CHECK(after.absent_reads - there.absent_reads <= 200);
}

// Pulls random keys; before each pull the keys of the next one are prefetched, if `ahead`. Returns the pages
// that were read.
std::uint64_t pull_some(Pair& pair, bool ahead, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::uint64_t before = pair.tiered.tier_stats().value().reads;
  auto keys = some_keys(random, 20000, 200);
  for (int i = 0; i < 40; ++i) {
    const auto next = some_keys(random, 20000, 200);
    if (ahead) {
      const KeyBatch later = pair.batch(next);
      pair.tiered.prefetch(Pair::slices(later));
      pair.tiered.prefetch(Pair::slices(later));  // nothing is read twice
    }
    pair.step(keys, 0.5F);
    keys = next;
  }
  pair.step(keys, 0.5F);
  return pair.tiered.tier_stats().value().reads - before;
}

TEST(pages_that_were_read_ahead_are_not_read_again) {
  std::array<std::uint64_t, 2> reads{};
  std::array<std::uint64_t, 2> misses{};
  for (const bool ahead : {false, true}) {
    Pair pair(adagrad(16), 4, 512 << 10U);
    for (std::uint64_t first = 0; first < 20000; first += 400) {
      pair.push(range(first, 400), 0.5F);
    }
    const TierStats before = pair.tiered.tier_stats().value();
    reads[ahead ? 1 : 0] = pull_some(pair, ahead, 5);
    const TierStats after = pair.tiered.tier_stats().value();
    misses[ahead ? 1 : 0] = after.misses - before.misses;
    // The first call is not known ahead, and rows may be evicted between a prefetch and its call.
    CHECK(!ahead || static_cast<double>(after.prefetched) >= 0.9 * static_cast<double>(misses[1]));
    CHECK(ahead || after.prefetched == 0);
    pair.expect_equal();
  }
  // What is evicted between calls depends on time; and of two rows of a page one may be read ahead.
  CHECK(static_cast<double>(misses[1]) <= 1.1 * static_cast<double>(misses[0]));
  CHECK(static_cast<double>(reads[1]) <= 1.05 * static_cast<double>(misses[1]));
}

TEST(slots_are_merged_between_calls_and_the_rows_of_the_last_calls_stay) {
  Pair pair(adagrad(16), 16, 1 << 20U);
  std::uint64_t reads = 0;
  for (std::uint64_t first = 0; first < 40000; first += 400) {
    const KeyBatch batch = pair.batch(range(first, 400));
    std::vector<float> rows(batch.size() * 16, 0.5F);
    pair.plain.push(Pair::slices(batch), rows);
    pair.tiered.push(Pair::slices(batch), rows);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::uint64_t before = pair.tiered.tier_stats().value().reads;
    pair.tiered.pull(Pair::slices(batch), rows);
    reads += pair.tiered.tier_stats().value().reads - before;
  }
  CHECK_EQ(reads, 0);
  for (int i = 0; pair.tiered.tier_stats().value().background_merges == 0; ++i) {
    CHECK(i < 10000);
    pair.step(range(1000 + 100U * static_cast<std::uint64_t>(i), 200), 0.5F);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pair.expect_equal();
}

TEST_OF_ONE_THREAD(prefetches_that_no_call_uses_are_bounded) {
  constexpr std::size_t kMemory = 256 << 10U;
  Pair pair(adagrad(16), 4, kMemory);
  for (std::uint64_t first = 0; first < 20000; first += 400) {
    pair.push(range(first, 400), 0.5F);
  }
  const std::uint64_t before = pair.tiered.tier_stats().value().reads;
  for (std::uint64_t first = 0; first < 20000; first += 400) {
    const KeyBatch later = pair.batch(range(first, 400));
    pair.tiered.prefetch(Pair::slices(later));
    CHECK(ahead_bytes(pair.tier) <= kMemory / 8 + 4096);
  }
  pair.expect_equal();
  CHECK(pair.tiered.tier_stats().value().reads - before <= 20000 / 8);
  pull_some(pair, true, 6);  // requests without use make room for others
  CHECK(pair.tiered.tier_stats().value().prefetched > 1000);
  pair.expect_equal();
}

TEST_OF_ONE_THREAD(a_prefetch_of_rows_in_memory_or_of_absent_keys_reads_nothing) {
  Pair pair(adagrad(16), 4, 1 << 20U);
  for (std::uint64_t first = 0; first < 20000; first += 400) {
    pair.push(range(first, 400), 0.5F);
  }
  const std::uint64_t before = pair.tiered.tier_stats().value().reads;
  const KeyBatch here = pair.batch(range(19900, 100));
  pair.tiered.prefetch(Pair::slices(here));
  CHECK_EQ(ahead_bytes(pair.tier), 0);
  const KeyBatch absent = pair.batch(range(1U << 30U, 1000));
  pair.tiered.prefetch(Pair::slices(absent));
  pair.expect_equal();
  CHECK(pair.tiered.tier_stats().value().reads - before <= 20);
}

TEST_OF_ONE_THREAD(clean_rows_are_dropped_without_a_write) {
  Pair pair(adagrad(16), 4, 128 << 10U);
  for (std::uint64_t first = 0; first < 4000; first += 200) {
    pair.push(range(first, 200), 0.5F);
  }
  const auto pull = [&](std::uint64_t first) {
    const KeyBatch batch = pair.batch(range(first, 200));
    std::vector<float> rows(batch.size() * 16);
    pair.tiered.pull(Pair::slices(batch), rows, nullptr);
  };
  const auto pull_all = [&] {
    for (std::uint64_t first = 0; first < 4000; first += 200) {
      pull(first);
    }
  };
  pull_all();
  pull_all();
  const TierStats before = pair.tiered.tier_stats().value();
  pull_all();
  const TierStats after = pair.tiered.tier_stats().value();
  CHECK_EQ(after.bytes_written, before.bytes_written);
  CHECK(after.misses > before.misses);
}

TEST_OF_ONE_THREAD(rows_that_are_used_often_stay) {
  Pair pair(adagrad(16), 4, 256 << 10U);
  const auto hot = range(1U << 20U, 100);
  for (std::uint64_t first = 0; first < 20000; first += 100) {
    pair.step(hot, 0.5F);
    pair.step(range(first, 100), 0.5F);
  }
  const TierStats before = pair.tiered.tier_stats().value();
  pair.step(hot, 0.5F);
  const TierStats after = pair.tiered.tier_stats().value();
  CHECK(after.misses - before.misses <= 5);
}

TEST(sections_go_into_a_tiered_table_and_come_out_of_it) {
  Pair pair(adagrad(8), 16, 128 << 10U);
  pair.push(range(0, 1000), 0.5F);
  for (std::uint64_t first = 1000; first < 8000; first += 250) {
    pair.push(range(first, 250), 0.5F);
  }
  // From two slots into sixteen, of a table that is larger than memory.
  Shard coarse(adagrad(8), Slots(2), pair.pool);
  std::vector<std::byte> bytes;
  std::vector<std::byte> tiered_bytes;
  for (std::uint32_t s = 0; s < 16; ++s) {
    const std::size_t rows = pair.plain.section(Slot{s}, bytes);
    CHECK_EQ(pair.tiered.section(Slot{s}, tiered_bytes), rows);
    CHECK(bytes == tiered_bytes);
    coarse.restore(rows, bytes);
  }
  Shard loaded(adagrad(8), Slots(16), pair.pool);
  const std::size_t memory = 128 << 10U;
  add_tier(loaded, memory);
  for (std::uint32_t s = 0; s < 2; ++s) {
    const std::size_t rows = coarse.section(Slot{s}, bytes);
    CHECK_EQ(loaded.restore(rows, bytes), rows);
    CHECK_THROWS(loaded.restore(rows, bytes), "in the table already");
  }
  CHECK_EQ(loaded.verify(), "");
  CHECK(reduce(loaded, Function::kDigest, {}, 0, loaded.slots().count()) ==
        reduce(pair.tiered, Function::kDigest, {}, 0, pair.tiered.slots().count()));
  CHECK(loaded.tier_stats().value().memory_bytes <= memory);
}

TEST(a_snapshot_has_the_rows_of_its_moment) {
  Pair pair(adagrad(8), 16, 128 << 10U);
  for (std::uint64_t first = 0; first < 6000; first += 250) {
    pair.push(range(first, 250), 0.5F);
  }
  std::vector<std::vector<std::byte>> sections(16);
  for (std::uint32_t s = 0; s < 16; ++s) {
    pair.plain.section(Slot{s}, sections[s]);
  }
  pair.tiered.pause_writers();
  Snapshot snapshot(pair.tiered, 0, Snapshot::Kind::kBase, 0, Purpose::kSave);
  pair.tiered.resume_writers();
  CHECK_EQ(snapshot.rows(), pair.plain.size());
  for (std::uint32_t s = 0; s < 16; ++s) {
    pair.step(range(s * 400, 300), 0.5F);
    const KeyBatch gone = pair.batch(range(s * 400 + 300, 20));
    pair.plain.erase(Pair::slices(gone));
    pair.tiered.erase(Pair::slices(gone));
    CHECK(snapshot.take(Slot{s}).section == sections[s]);
  }
  snapshot.done("base");
  snapshot.close();
  pair.expect_equal();

  // A delta on it: the rows of the base outside its ranges, and its own.
  pair.step(range(100, 50), 0.5F);
  const KeyBatch gone = pair.batch(range(5000, 20));
  pair.plain.erase(Pair::slices(gone));
  pair.tiered.erase(Pair::slices(gone));
  pair.tiered.pause_writers();
  Snapshot delta(pair.tiered, 0, Snapshot::Kind::kDelta, 0, Purpose::kSave);
  pair.tiered.resume_writers();
  std::vector<std::byte> merged;
  std::vector<std::byte> now;
  for (std::uint32_t s = 0; s < 16; ++s) {
    const Snapshot::Piece piece = delta.take(Slot{s});
    // The changes of before are in it as well: they came after the moment of the base.
    const std::size_t base_rows = sections[s].empty() ? 0 : [&] {
      for (std::size_t rows = 0;; ++rows) {
        if (SectionCodec(pair.plain.rows()).offsets(rows).back() == sections[s].size()) {
          return rows;
        }
      }
    }();
    SectionCodec(pair.plain.rows())
        .merge(base_rows, sections[s], piece.rows, piece.section,
               DirtyRanges(Slots(16), piece.ranges.bits, piece.ranges.count, piece.ranges.bytes), merged);
    pair.plain.section(Slot{s}, now);
    CHECK(merged == now);
  }
}

// Changes bytes of the file behind the table's back.
void damage(const Tier& tier, std::uint64_t offset) {
  alignas(PageFile::kPage) static std::array<std::byte, PageFile::kPage> page;
  const auto at = static_cast<off_t>(offset / PageFile::kPage * PageFile::kPage);
  CHECK_EQ(pread(tier.file().descriptor(), page.data(), page.size(), at), std::ssize(page));
  page[offset % PageFile::kPage] ^= std::byte{16};
  CHECK_EQ(pwrite(tier.file().descriptor(), page.data(), page.size(), at), std::ssize(page));
}

// Pages of chunks, in use or free, without the room beyond them.
std::uint64_t pages_of(const Tier& tier) { return tier.file().end_bytes() / PageFile::kPage; }

TEST_OF_ONE_THREAD(a_flipped_bit_and_a_lost_end_are_found_and_named) {
  Pair pair(adagrad(16), 2, 64 << 10U);
  for (std::uint64_t first = 0; first < 2000; first += 100) {
    pair.push(range(first, 100), 0.5F);
  }
  pair.expect_equal();
  // A flipped bit is found, unless its page is of no run; wrong rows are never returned.
  const auto digest = reduce(pair.tiered, Function::kDigest, {}, 0, pair.tiered.slots().count());
  std::mt19937_64 random(11);
  int found = 0;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t offset = random() % (pages_of(pair.tier) * PageFile::kPage);
    damage(pair.tier, offset);
    try {
      CHECK(reduce(pair.tiered, Function::kDigest, {}, 0, pair.tiered.slots().count()) == digest);
    } catch (const TierCorruptionError& error) {
      ++found;
      const std::string what = error.what();
      CHECK(what.find("is damaged: slot ") != std::string::npos);
      CHECK(what.find("byte " + std::to_string(offset / PageFile::kPage * PageFile::kPage)) !=
            std::string::npos);
    }
    damage(pair.tier, offset);  // back
  }
  CHECK(found >= 20);
  pair.expect_equal();
  // Batches fail before they change anything.
  for (std::uint64_t page = 0; page < pages_of(pair.tier); ++page) {
    damage(pair.tier, page * PageFile::kPage + 100);
  }
  const std::uint64_t step = pair.tiered.step();
  const KeyBatch batch = pair.batch(range(0, 100));
  std::vector<float> grads(batch.size() * 16, 1.0F);
  pair.tiered.prefetch(Pair::slices(batch), nullptr);  // the call that needs the rows reports it
  CHECK_THROWS(pair.tiered.push(Pair::slices(batch), grads, {}, nullptr), "load the last checkpoint");
  CHECK_EQ(pair.tiered.step(), step);
  for (std::uint64_t page = 0; page < pages_of(pair.tier); ++page) {
    damage(pair.tier, page * PageFile::kPage + 100);
  }
  pair.expect_equal();
  CHECK_EQ(ftruncate(pair.tier.file().descriptor(), PageFile::kPage), 0);
  CHECK_THROWS(reduce(pair.tiered, Function::kDigest, {}, 0, pair.tiered.slots().count()), "was truncated");
}

TEST_OF_ONE_THREAD(a_full_disk_changes_nothing) {
  Pair pair(adagrad(16), 2, 64 << 10U);
  for (std::uint64_t first = 0; first < 1000; first += 100) {
    pair.push(range(first, 100), 0.5F);
  }
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit less = before;
  less.rlim_cur = pair.tier.file().end_bytes();
  setrlimit(RLIMIT_FSIZE, &less);
  int failed = 0;
  for (std::uint64_t first = 1000; first < 3000; first += 100) {
    const KeyBatch batch = pair.batch(range(first, 100));
    const std::vector<float> grads(batch.size() * 16, 1.0F);
    const std::uint64_t step = pair.tiered.step();
    try {
      pair.tiered.push(Pair::slices(batch), grads, {}, nullptr);
    } catch (const TierStorageError& error) {
      ++failed;
      CHECK(std::string(error.what()).find(kDirectory + " cannot write") != std::string::npos);
      CHECK_EQ(pair.tiered.step(), step);
      continue;
    }
    pair.plain.push(Pair::slices(batch), grads);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(failed > 0);
  pair.expect_equal();
  pair.push(range(5000, 100), 0.5F);
  pair.expect_equal();
}

TEST_OF_ONE_THREAD(the_file_ends_with_its_last_chunk_and_is_gone_with_the_table) {
  std::uint64_t largest = 0;
  {
    Pair pair(adagrad(16), 2, 64 << 10U);
    for (std::uint64_t first = 0; first < 4000; first += 100) {
      pair.push(range(first, 100), 0.5F);
    }
    largest = pair.tier.file().used_bytes();
    for (std::uint64_t first = 0; first < 4000; first += 100) {
      const KeyBatch batch = pair.batch(range(first, 100));
      CHECK_EQ(pair.tiered.erase(Pair::slices(batch)), 100);
    }
    CHECK_EQ(pair.tiered.size(), 0);
    const std::array everything{1.0};
    reduce(pair.tiered, Function::kDecay, everything, 0, pair.tiered.slots().count());
    for (std::uint64_t first = 0; first < 300; first += 100) {
      pair.push(range(first, 100), 0.5F);
    }
    CHECK(pair.tier.file().used_bytes() < largest);
    CHECK(pair.tier.file().used_bytes() <= pair.tier.file().file_bytes());
  }
  CHECK(largest > 0);
}

TEST_OF_ONE_THREAD(what_a_tiered_table_cannot_have_is_refused) {
  ThreadPool pool(1);
  const auto make = [&](const TableSpec& spec, std::size_t memory, const std::string& directory) {
    Shard shard(spec, Slots(16), pool);
    const Tier tier(shard, directory, memory);
  };
  CHECK_THROWS(make(adagrad(2), 1000, kDirectory), "needs at least 65536 bytes");
  CHECK_THROWS(make(adagrad(2), 1 << 20U, kDirectory + "/no such directory"), "cannot be created");
  TableSpec most = adagrad(2);
  most.lifecycle = Lifecycle(std::nullopt, {{"MaxRows", {{"rows", 100}, {"frequent", 0}}}});
  CHECK_THROWS(make(most, 1 << 20U, kDirectory), "no MaxRows rule");
}

// Beside the tier's own thread, which evicts rows; the thread sanitizer sees whether it has its turn.
TEST(a_save_that_a_server_begins_between_pushes_counts_the_rows) {
  ThreadPool pool(1);
  TierMemory memory(std::size_t{16} << 15U);
  const auto shard = std::make_shared<Shard>(adagrad(4), Slots(16), pool, Locks::kOne);
  add_tier(*shard, memory);
  std::mt19937_64 random(3);
  std::set<std::uint64_t> known;
  for (std::uint64_t n = 1; n <= 150; ++n) {
    std::set<std::uint64_t> keys;
    while (keys.size() < 400) {
      keys.insert(random() % 40000);
    }
    known.insert(keys.begin(), keys.end());
    const KeyBatch batch(std::vector<std::uint64_t>(keys.begin(), keys.end()), shard->slots(), pool);
    shard->push_per_key(batch, std::vector<float>(keys.size() * 4, 1.0F), {}, nullptr);
    const std::vector<CheckpointSession::TableRequest> wanted{
        {.parts = {{.shard = shard, .first = 0, .end = 16, .clock = 0}}, .kind = Snapshot::Kind::kPlain}};
    CheckpointSession session({.job = 1, .rank = 0, .incarnation = 1, .sequence = n}, wanted);
    CHECK_EQ(session.summaries()[2], known.size());
    session.cancel();
  }
  CHECK(shard->tier_stats()->background_merges > 0);
}

// Two arcs of a server share the memory of their tiers, and change rows while another thread takes the slots
// of a save.
TEST(a_tier_beside_a_save_on_a_server) {
  constexpr std::size_t kDim = 8;
  constexpr std::uint64_t kKeys = 8000;
  ThreadPool pool(1);
  const Slots slots(16);
  Shard plain(adagrad(kDim), slots, pool);
  TierMemory memory(std::size_t{16} << 14U);
  std::vector<std::shared_ptr<Shard>> shards;
  for (const std::size_t first : {0U, 8U}) {
    shards.push_back(
        std::make_shared<Shard>(adagrad(kDim), slots, pool, Locks::kOne, nullptr, first, first + 8));
    add_tier(*shards.back(), memory);
  }
  std::mt19937_64 random(17);
  const auto each_part = [&](const KeyBatch& batch, const auto& use) {
    for (const auto& shard : shards) {
      const auto bounds = batch.offsets().subspan(shard->first_slot(), 9);
      std::vector<std::uint64_t> offsets(bounds.begin(), bounds.end());
      for (std::uint64_t& offset : offsets) {
        offset -= bounds.front();
      }
      use(*shard, SlotSlices{batch.hashes().subspan(bounds.front(), bounds.back() - bounds.front()), offsets},
          bounds.front() * kDim, (bounds.back() - bounds.front()) * kDim);
    }
  };
  const auto step = [&] {
    const KeyBatch batch(some_keys(random, kKeys, 300), slots, pool);
    const SlotSlices all{batch.hashes(), batch.offsets()};
    if (random() % 5 == 0) {
      std::size_t erased = plain.erase(all);
      each_part(batch, [&](Shard& shard, const SlotSlices& part, std::size_t, std::size_t) {
        erased -= shard.erase(part);
      });
      CHECK_EQ(erased, 0);
      return;
    }
    std::vector<float> rows(batch.size() * kDim);
    std::vector<float> tiered_rows(rows.size());
    plain.pull(all, rows);
    each_part(batch, [&](Shard& shard, const SlotSlices& part, std::size_t first, std::size_t count) {
      shard.pull(part, std::span(tiered_rows).subspan(first, count));
    });
    CHECK(rows == tiered_rows);
    plain.push(all, rows);
    each_part(batch, [&](Shard& shard, const SlotSlices& part, std::size_t first, std::size_t count) {
      shard.push(part, std::span(std::as_const(rows)).subspan(first, count));
    });
  };
  const auto moved = [&] {  // rows that came from the disk, and slots that went there
    std::array<std::uint64_t, 2> sums{};
    for (const auto& shard : shards) {
      sums[0] += shard->tier_stats()->misses;
      sums[1] += shard->tier_stats()->merges;
    }
    return sums;
  };
  for (int i = 0; i < 100; ++i) {
    step();
  }
  for (std::uint64_t round = 1; round <= 4; ++round) {
    std::vector<std::vector<std::byte>> sections(slots.count());
    for (std::uint32_t s = 0; s < slots.count(); ++s) {
      plain.section(Slot{s}, sections[s]);
    }
    const std::size_t rows = plain.size();
    const auto before = moved();
    const std::vector<CheckpointSession::TableRequest> wanted{
        {.parts = {{.shard = shards[0], .first = 0, .end = 8, .clock = 0},
                   {.shard = shards[1], .first = 8, .end = 16, .clock = 0}},
         .kind = Snapshot::Kind::kPlain}};
    CheckpointSession session({.job = 1, .rank = 0, .incarnation = 1, .sequence = round}, wanted);
    CHECK_EQ(session.summaries()[2], rows);
    std::atomic<std::size_t> steps = 0;
    std::thread saver([&] {
      for (std::uint32_t s = 0; s < slots.count(); ++s) {
        while (steps < 2 * s) {  // rows move between the slots that are taken, and while one is taken
          std::this_thread::yield();
        }
        CHECK(session.take(0, Slot{s}).section == sections[s]);
      }
    });
    for (; steps < 2 * slots.count(); ++steps) {
      step();
    }
    saver.join();
    session.end("save " + std::to_string(round));
    CHECK(session.closed());
    CHECK(moved()[0] > before[0]);
    CHECK(moved()[1] > before[1]);
    std::vector<double> digest;
    for (const auto& shard : shards) {
      const auto some = reduce(*shard, Function::kDigest, {}, shard->first_slot(), shard->end_slot());
      digest.insert(digest.end(), some.begin(), some.end());
      CHECK_EQ(shard->verify(), "");
    }
    CHECK(digest == reduce(plain, Function::kDigest, {}, 0, slots.count()));
  }
}

TEST(a_change_of_all_rows_waits_for_a_save_between_slots) {
  Pair pair(adagrad(8), 16, 128 << 10U);
  for (std::uint64_t first = 0; first < 6000; first += 250) {
    pair.push(range(first, 250), 0.5F);
  }
  pair.tiered.pause_writers();
  Snapshot snapshot(pair.tiered, 0, Snapshot::Kind::kPlain, 1 << 15U, Purpose::kSave);  // of a slot, about
  pair.tiered.resume_writers();
  std::atomic<bool> changes = false;
  std::thread saver([&] {
    while (!changes) {
      std::this_thread::yield();
    }
    std::size_t saved = 0;
    for (std::uint32_t s = 0; s < 16; ++s) {
      saved += snapshot.take(Slot{s}).rows;  // SnapshotLostError: changes did not wait
    }
    CHECK_EQ(saved, snapshot.rows());
  });
  const auto halve = [](std::span<float> weights) {
    for (float& weight : weights) {
      weight *= 0.5F;
    }
  };
  pair.tiered.core().with_slots(0, 16, true, [&](std::size_t first, std::size_t end) {
    transform_weights(pair.tiered, first, end, halve);
    changes = true;
    return true;
  });
  saver.join();
  transform_weights(pair.plain, 0, 16, halve);
  snapshot.close();
  pair.expect_equal();
}

TEST(threads_share_a_tiered_table) {
  Pair pair(adagrad(4), 16, 128 << 10U);
  constexpr std::size_t kThreads = 3;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 2; ++round) {
        for (std::uint64_t first = 0; first < 3000; first += 250) {
          const KeyBatch batch = pair.batch(range(t << 32U | first, 250));
          const KeyBatch later = pair.batch(range(t << 32U | (first + 250) % 3000, 250));
          pair.tiered.prefetch(Pair::slices(later));
          std::vector<float> rows(batch.size() * 4, 1.0F);
          pair.tiered.push(Pair::slices(batch), rows, {}, nullptr);
          pair.tiered.pull(Pair::slices(batch), rows, nullptr);
        }
      }
    });
  }
  std::size_t saved = 0;
  pair.tiered.pause_writers();
  {
    Snapshot snapshot(pair.tiered, 0, Snapshot::Kind::kPlain, 0, Purpose::kSave);
    pair.tiered.resume_writers();
    for (std::uint32_t s = 0; s < 16; ++s) {
      saved += snapshot.take(Slot{s}).rows;
    }
    CHECK_EQ(saved, snapshot.rows());
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(pair.tiered.size(), kThreads * 3000);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t t = 0; t < kThreads; ++t) {
      for (std::uint64_t first = 0; first < 3000; first += 250) {
        const KeyBatch batch = pair.batch(range(t << 32U | first, 250));
        pair.plain.push(Pair::slices(batch), std::vector<float>(batch.size() * 4, 1.0F));
      }
    }
  }
  pair.expect_equal();
}

}  // namespace
}  // namespace shoal::tier_test
