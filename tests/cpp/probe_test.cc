// Probe compared with single lookups, in several tables that change during it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "check.h"
#include "table/probe.h"
#include "table/slot_table.h"

namespace shoal::probe_test {
namespace {

// A few tables of one store, filled with every other hash of a list that covers all of them. The first
// `colliding_count` hashes have one home in the first table.
struct Store {
  Store(std::size_t row_bytes, std::size_t hash_count, std::size_t slot_count,
        std::size_t colliding_count = 0)
      : slots(slot_count), layout(row_bytes, slots), chunks(row_bytes) {
    for (std::uint32_t s = 0; s < slots.count(); ++s) {
      tables.push_back(std::make_unique<SlotTable>(layout, Slot{s}, chunks));
    }
    std::mt19937_64 random(row_bytes);
    std::set<std::uint64_t> distinct;
    while (distinct.size() < colliding_count) {
      distinct.insert(random() % (2 * colliding_count) << 6U);
    }
    while (distinct.size() < hash_count) {
      distinct.insert(random());
    }
    hashes.assign(distinct.begin(), distinct.end());
    for (std::size_t i = 0; i < hashes.size(); i += 2) {
      insert(hashes[i]);
    }
  }

  SlotTable& table(std::uint64_t hash) { return *tables[index_of(slots.of(hash))]; }

  void insert(std::uint64_t hash) {
    table(hash).make_room(1);
    std::byte* const row = table(hash).insert(hash);
    std::memcpy(row, &hash, 4);
    there.insert(hash);
  }

  // Aims at hashes[first, last), which must not lie in too many tables.
  void prepare(Probe& probe, std::size_t first, std::size_t last) {
    probe.start(hashes.data() + first);
    while (first != last) {
      std::size_t end = first;
      while (end != last && slots.of(hashes[end]) == slots.of(hashes[first])) {
        ++end;
      }
      probe.prepare(table(hashes[first]), end - first);
      first = end;
    }
  }

  void check(Probe& probe, std::size_t first) {
    for (std::size_t i = 0; i < probe.size(); ++i) {
      const std::byte* const row = probe.rows()[i];
      const std::uint64_t hash = hashes[first + i];
      CHECK_EQ(row != nullptr, there.contains(hash));
      if (row != nullptr) {
        std::uint32_t low = 0;
        std::memcpy(&low, row, 4);
        CHECK_EQ(low, static_cast<std::uint32_t>(hash));
      }
    }
  }

  Slots slots;
  Layout layout;
  Chunks chunks;
  std::vector<std::unique_ptr<SlotTable>> tables;
  std::vector<std::uint64_t> hashes;  // ascending
  std::set<std::uint64_t> there;
};

constexpr std::size_t kRowBytes[] = {4, 8, 12, 16, 20, 68};

void check_runs(std::size_t colliding_count) {
  for (const std::size_t bytes : kRowBytes) {
    for (const std::size_t slot_count : {2UL, 64UL, 1024UL}) {
      Store store(bytes, 20'000, slot_count, colliding_count);
      CHECK(colliding_count == 0 || store.tables[0]->is_scrambled());
      Probe probe(store.layout);
      for (std::size_t first = 0; first < store.hashes.size(); first += 20) {
        for (const std::size_t count : {0UL, 1UL, 20UL}) {
          store.prepare(probe, first, first + count);
          CHECK_EQ(probe.size(), count);
          PrefetchCursor ahead = probe.home_lines();
          probe.probe(ahead);
          probe.resolve();
          store.check(probe, first);
        }
      }
    }
  }
}

TEST(a_run_finds_what_is_there_in_however_many_tables) { check_runs(0); }

TEST(a_run_finds_what_is_there_in_a_table_that_is_scrambled) { check_runs(8'000); }

TEST(a_run_in_tables_that_are_empty_finds_nothing) {
  Store store(8, 0, 4);
  store.hashes = {0, 1, std::uint64_t{1} << 62U, ~std::uint64_t{0}};
  Probe probe(store.layout);
  store.prepare(probe, 0, 4);
  PrefetchCursor none;
  probe.probe(none);
  probe.resolve();
  store.check(probe, 0);
}

// As in a ProbePipeline: rows are created for one run while the next runs are in progress.
TEST(tables_that_grow_and_shift_between_the_steps_of_a_run_do_not_lose_its_rows) {
  for (const std::size_t bytes : kRowBytes) {
    Store store(bytes, 6'000, 4, 4'000);  // some inserts scramble a table
    std::mt19937_64 random(9);
    Probe probe(store.layout);
    for (std::size_t first = 0; first + Probe::kMax <= store.hashes.size(); first += 40) {
      const auto disturb = [&] {
        const std::size_t wanted = random() % 3 == 0 ? 30 : random() % 2;
        for (std::size_t k = 0; k < wanted; ++k) {
          const std::size_t near = first + random() % 500;
          const std::uint64_t hash = store.hashes[std::min(near, store.hashes.size() - 1)];
          if (!store.there.contains(hash)) {
            store.insert(hash);
          } else if (random() % 4 == 0) {
            CHECK(store.table(hash).erase(hash));
            store.table(hash).give_back();
            store.there.erase(hash);
          }
        }
      };
      store.prepare(probe, first, first + Probe::kMax);
      PrefetchCursor ahead = probe.home_lines();
      if (random() % 2 == 0) {
        disturb();
      }
      probe.probe(ahead);
      const auto before = store.there;
      std::vector<std::uint64_t> gone;
      for (std::size_t k = 0; k < 20; ++k) {
        const std::uint64_t hash = random();  // none of the run's own
        store.insert(hash);
        gone.push_back(hash);
      }
      probe.resolve();
      store.check(probe, first);
      for (std::size_t k = 0; k < 20; ++k) {
        const std::uint64_t hash = random();
        store.insert(hash);
        gone.push_back(hash);
      }
      probe.resolve();
      store.check(probe, first);
      for (const std::uint64_t hash : gone) {
        CHECK(store.table(hash).erase(hash));
      }
      store.there = before;
      for (const auto& table : store.tables) {
        CHECK_EQ(table->verify(), 0);
      }
    }
  }
}

}  // namespace
}  // namespace shoal::probe_test
