// SlotTable compared with a map, with verify() after every step.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "table/match.h"
#include "table/slot_table.h"

namespace shoal::slot_table_test {
namespace {

using Rows = std::map<std::uint64_t, std::uint32_t>;  // the expected contents of a table: one number per row

std::byte* find_one(SlotTable& table, std::uint64_t hash) {
  std::byte* row = nullptr;
  table.find({&hash, 1}, {&row, 1});
  return row;
}

// A row's first and last words hold its number.
void write(std::byte* row, std::size_t row_bytes, std::uint32_t number) {
  std::memcpy(row + row_bytes - 4, &number, 4);
  std::memcpy(row, &number, 4);
}

std::uint32_t read(const std::byte* row, std::size_t row_bytes) {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
  std::memcpy(&first, row, 4);
  std::memcpy(&last, row + row_bytes - 4, 4);
  CHECK_EQ(first, last);
  return first;
}

void check_entries(const SlotTable& table, const Rows& rows, std::size_t row_bytes) {
  const auto entries = table.entries();
  CHECK_EQ(entries.size(), rows.size());
  auto expected = rows.begin();
  for (const auto& entry : entries) {  // both ascend
    CHECK_EQ(entry.hash, expected->first);
    CHECK_EQ(read(entry.row, row_bytes), expected->second);
    ++expected;
  }
}

void check_same(SlotTable& table, const Rows& rows, std::size_t row_bytes) {
  CHECK_EQ(table.verify(), 0);
  CHECK_EQ(table.size(), rows.size());
  check_entries(table, rows, row_bytes);
}

void insert(SlotTable& table, Rows& rows, std::uint64_t hash, std::size_t row_bytes, std::uint32_t number) {
  if (find_one(table, hash) != nullptr) {
    CHECK(rows.contains(hash));
    return;
  }
  CHECK(!rows.contains(hash));
  table.make_room(1);
  write(table.insert(hash), row_bytes, number);
  rows[hash] = number;
}

// Inserts many hashes at once: each that is absent is started once, and afterwards all have their rows.
void insert_all(SlotTable& table, Rows& rows, std::vector<std::uint64_t> hashes, std::size_t row_bytes,
                std::uint32_t number) {
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  std::vector<std::byte*> found(hashes.size());
  table.find(hashes, found);
  const auto missing = static_cast<std::size_t>(std::count(found.begin(), found.end(), nullptr));
  const std::size_t before = table.size();
  const std::uint64_t version = table.version();
  table.make_room(missing);
  std::size_t started = 0;
  table.insert_missing(hashes, found, [&](std::size_t i, std::byte* row) {
    CHECK(!rows.contains(hashes[i]));
    rows[hashes[i]] = number + static_cast<std::uint32_t>(i);
    write(row, row_bytes, rows[hashes[i]]);
    ++started;
  });
  CHECK_EQ(started, missing);
  CHECK_EQ(table.size(), before + missing);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    std::byte* const row = find_one(table, hashes[i]);
    CHECK_EQ(read(row, row_bytes), rows[hashes[i]]);
    CHECK(row == found[i] || version != table.version());
  }
}

// Exactly the rows in the ranges are found: few ranges or many, at any positions.
void check_ranges(const SlotTable& table, const Rows& rows, Slots slots, std::size_t row_bytes,
                  std::mt19937_64& random) {
  for (const std::size_t among : {std::size_t{0}, std::size_t{300}, std::size_t{10}, std::size_t{1}}) {
    DirtyRanges ranges(slots);
    for (const auto& [hash, number] : rows) {
      if (among != 0 && random() % among == 0) {
        ranges.add({&hash, 1}, rows.size());
      }
    }
    Rows expected;
    std::ranges::copy_if(rows, std::inserter(expected, expected.end()),
                         [&](const auto& row) { return ranges.has(row.first); });
    Rows found;
    std::size_t times = 0;
    table.each_row_in(ranges, [&](std::uint64_t hash, const std::byte* row) {
      found[hash] = read(row, row_bytes);
      ++times;
    });
    CHECK(found == expected);
    CHECK_EQ(times, expected.size());
  }
}

constexpr std::uint64_t kFirst = 0x8000000000000000U;  // slot 2 of 4
constexpr std::uint64_t kLast = 0xbfffffffffffffffU;
constexpr std::size_t kRowBytes[] = {4, 8, 12, 16, 20, 68, 128};

// Slots of which buckets say that they are passed, or too few of them. A slot of 16 holds the first quarter
// of slot 2 of 4.
constexpr std::size_t kSlotCounts[] = {4, 16};
std::uint64_t in_slot(Slots slots, std::uint64_t hash) {
  return slots.count() == 4 ? hash : hash & ~(std::uint64_t{3} << 60U);
}

// Fills, empties and fills again with hashes from `draw`, which lie in slot 2 of 4.
void check_against_map(std::size_t row_bytes, Slots slots,
                       const std::function<std::uint64_t(std::mt19937_64&)>& any) {
  const auto draw = [&](std::mt19937_64& random) { return in_slot(slots, any(random)); };
  const Layout layout(row_bytes, slots);
  Chunks chunks(layout.row_bytes);
  SlotTable table(layout, slots.of(kFirst), chunks);
  Rows rows;
  std::mt19937_64 random(row_bytes);
  for (int phase = 0; phase < check::rounds(30); ++phase) {
    const bool erasing = phase % 10 >= 6;
    if (!erasing && random() % 2 == 0) {
      std::vector<std::uint64_t> hashes(random() % 300);
      std::ranges::generate(hashes, [&] { return draw(random); });
      insert_all(table, rows, hashes, row_bytes, static_cast<std::uint32_t>(random()));
      check_same(table, rows, row_bytes);
    }
    for (int k = 0; k < 150; ++k) {
      const std::uint64_t hash = erasing && !rows.empty() && k % 3 != 0 ? rows.begin()->first : draw(random);
      if (erasing) {
        CHECK_EQ(table.erase(hash), rows.erase(hash) == 1);
      } else {
        insert(table, rows, hash, row_bytes, static_cast<std::uint32_t>(random()));
      }
    }
    if (erasing) {
      table.give_back();
    }
    check_same(table, rows, row_bytes);
    check_ranges(table, rows, slots, row_bytes, random);
  }
  while (!rows.empty()) {
    CHECK(table.erase(rows.begin()->first));
    rows.erase(rows.begin());
  }
  table.give_back();
  CHECK_EQ(table.bytes(), 0);
}

void check_against_map(std::size_t row_bytes, const std::function<std::uint64_t(std::mt19937_64&)>& draw) {
  for (const std::size_t count : kSlotCounts) {
    check_against_map(row_bytes, Slots(count), draw);
  }
}

TEST(a_table_agrees_with_a_map_on_mixed_keys) {
  for (const std::size_t bytes : kRowBytes) {
    check_against_map(bytes, [](std::mt19937_64& random) { return random() >> 2U | kFirst; });
  }
}

TEST(neighbouring_hashes_at_either_end_of_a_slot_wrap_around_and_grow) {
  for (const std::size_t bytes : kRowBytes) {
    check_against_map(bytes, [](std::mt19937_64& random) { return kLast - random() % 1000; });
    check_against_map(bytes, [](std::mt19937_64& random) { return kFirst + random() % 1000; });
    check_against_map(bytes, [](std::mt19937_64& random) {
      return random() % 2 == 0 ? kLast - random() % 300 : random() >> 2U | kFirst;
    });
  }
}

// The last six bits choose a hash's second bucket, the first ones its home: these share both, so that the
// rest of their probe sequences leads over colliding hashes.
TEST(hashes_with_one_home_and_one_second_bucket_go_on_behind_it) {
  for (const std::size_t bytes : kRowBytes) {
    for (const std::uint64_t base : {kFirst, kLast - (400UL << 6U)}) {
      check_against_map(bytes, [&](std::mt19937_64& random) { return base + (random() % 400 << 6U); });
      check_against_map(bytes, [&](std::mt19937_64& random) {
        return random() % 2 == 0 ? base + (random() % 100 << 6U) : random() >> 2U | kFirst;
      });
    }
  }
}

// Chosen hashes that collide in more buckets than an insert passes: the slot places them by another mix from
// then on, and does everything that it did before. Once it is empty it places hashes in their order again.
void check_scrambled(std::size_t slot_count, bool is_batched) {
  for (const std::size_t bytes : kRowBytes) {
    const Slots slots(slot_count);
    const Layout layout(bytes, slots);
    Chunks chunks(layout.row_bytes);
    SlotTable table(layout, slots.of(kFirst), chunks);
    std::mt19937_64 random(bytes);
    Rows rows;
    const auto colliding = [&] { return kFirst + (random() % 8000 << 6U); };
    const auto draw = [&](std::uint32_t k) {
      return k % 3 == 0 ? in_slot(slots, random() >> 2U | kFirst) : colliding();
    };
    if (is_batched) {
      while (!table.is_scrambled()) {
        std::vector<std::uint64_t> hashes;
        for (std::uint32_t k = 0; k < 500; ++k) {
          hashes.push_back(draw(k));
        }
        insert_all(table, rows, hashes, bytes, 7);
        check_same(table, rows, bytes);
      }
    } else {
      for (std::uint32_t k = 0; k < 6000; ++k) {
        insert(table, rows, draw(k), bytes, k);
      }
    }
    CHECK(table.is_scrambled());
    check_same(table, rows, bytes);
    check_ranges(table, rows, slots, bytes, random);

    SlotTable image(layout, slots.of(kFirst), chunks);
    image.become_image_of(table);
    check_entries(image, rows, bytes);

    for (int k = 0; k < 4000; ++k) {
      const std::uint64_t hash = colliding();
      CHECK_EQ(table.erase(hash), rows.erase(hash) == 1);
    }
    table.give_back();
    check_same(table, rows, bytes);
    for (std::uint32_t k = 0; k < 3000; ++k) {  // it grows
      insert(table, rows, in_slot(slots, random() >> 2U | kFirst), bytes, k);
    }
    check_same(table, rows, bytes);
    while (!rows.empty()) {
      CHECK(table.erase(rows.begin()->first));
      rows.erase(rows.begin());
    }
    table.give_back();
    CHECK(!table.is_scrambled());
    insert(table, rows, kFirst + 1, bytes, 1);
    check_same(table, rows, bytes);
  }
}

TEST(a_slot_whose_hashes_were_chosen_to_collide_is_scrambled_and_answers_as_before) {
  for (const std::size_t count : kSlotCounts) {
    check_scrambled(count, false);
  }
}

TEST(a_slot_is_scrambled_amid_many_inserts) {
  for (const std::size_t count : kSlotCounts) {
    check_scrambled(count, true);
  }
}

TEST(random_hashes_do_not_scramble_a_slot) {
  const Slots slots(4);
  const Layout layout(8, slots);
  SlotTable table(layout, Slot{2});
  std::mt19937_64 random(5);
  for (int k = 0; k < check::rounds(400'000); ++k) {
    table.make_room(1);
    table.insert(random() >> 2U | kFirst);
  }
  CHECK(!table.is_scrambled());
}

// entries() goes through buckets window by window: rows that stand far from their homes must come where they
// belong.
TEST(rows_of_many_windows_come_in_order_wherever_they_stand) {
  std::mt19937_64 random(1);
  for (const std::size_t bytes : kRowBytes) {
    for (const std::uint64_t first : {kFirst, kFirst + (1UL << 61U), kLast - 3000}) {
      const Slots slots(4);
      const Layout layout(bytes, slots);
      Chunks chunks(layout.row_bytes);
      SlotTable table(layout, Slot{2}, chunks);
      Rows rows;
      for (std::uint32_t k = 0; k < 6000; ++k) {
        insert(table, rows, k % 3 == 0 ? first + random() % 3000 : random() >> 2U | kFirst, bytes, k);
      }
      check_same(table, rows, bytes);
    }
  }
}

TEST(hash_0_and_the_greatest_hash_have_rows_like_any_other) {
  for (const std::size_t count : {2UL, 1024UL, 16384UL}) {
    const Slots slots(count);
    const Layout layout(8, slots);
    for (const std::uint64_t hash : {std::uint64_t{0}, ~std::uint64_t{0}}) {
      Chunks chunks(layout.row_bytes);
      SlotTable table(layout, slots.of(hash), chunks);
      Rows rows;
      CHECK(find_one(table, hash) == nullptr);
      insert(table, rows, hash, 8, 7);
      check_same(table, rows, 8);
      CHECK(table.erase(hash));
      CHECK(!table.erase(hash));
    }
  }
}

TEST(many_hashes_are_found_in_one_call_as_they_are_one_by_one) {
  const Slots slots(2);
  const Layout layout(8, slots);
  Chunks chunks(layout.row_bytes);
  SlotTable table(layout, Slot{1}, chunks);
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> hashes;
  for (int i = 0; i < 5000; ++i) {
    hashes.push_back(random() | kFirst);
  }
  std::sort(hashes.begin(), hashes.end());
  for (std::size_t i = 0; i < hashes.size(); i += 2) {  // every other one is present
    table.make_room(1);
    table.insert(hashes[i]);
  }
  for (const std::size_t count : {1UL, 15UL, 16UL, 17UL, 127UL, 128UL, 129UL, 5000UL}) {
    std::vector<std::byte*> rows(count);
    table.find(hashes, rows);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(rows[i] == find_one(table, hashes[i]));
      CHECK_EQ(rows[i] != nullptr, i % 2 == 0);
    }
  }
}

TEST(both_ways_of_matching_a_bucket_agree) {
#if defined(SHOAL_SIMD)
  if (!has_simd()) {
    return;
  }
  std::mt19937_64 random(4);
  alignas(64) std::uint64_t words[8];
  for (int i = 0; i < 10'000; ++i) {
    for (auto& word : words) {
      word = random() % 3;
    }
    const auto* const line = reinterpret_cast<const std::byte*>(words);
    const std::uint64_t but = random() % 3;
    const std::uint64_t wanted = random() % 3 | but;
    CHECK_EQ(SimdMatch::in<2>(line, wanted, but), PortableMatch::in<2>(line, wanted, but));
    CHECK_EQ(SimdMatch::in<3>(line, wanted, but), PortableMatch::in<3>(line, wanted, but));
    CHECK_EQ(SimdMatch::in<4>(line, wanted, but), PortableMatch::in<4>(line, wanted, but));
    CHECK_EQ(SimdMatch::in<5>(line, wanted, but), PortableMatch::in<5>(line, wanted, but));
  }
#endif
}

TEST(a_key_of_8_byte_rows_takes_less_than_20_bytes_at_every_size_of_a_large_table) {
  const Slots slots(64);
  const Layout layout(8, slots);
  Chunks chunks(layout.row_bytes);
  std::vector<SlotTable> tables;
  for (std::uint32_t s = 0; s < slots.count(); ++s) {
    tables.emplace_back(layout, Slot{s}, chunks);
  }
  std::size_t keys = 0;
  for (const std::size_t target : {400'000UL, 430'000UL, 460'000UL, 520'000UL, 600'000UL}) {
    for (; keys < target; ++keys) {
      const std::uint64_t hash = mix(keys);
      SlotTable& table = tables[index_of(slots.of(hash))];
      table.make_room(1);
      table.insert(hash);
    }
    std::size_t bytes = 0;
    for (const auto& table : tables) {
      bytes += table.bytes();
    }
    CHECK(bytes < 20 * keys);
    CHECK(bytes > 18 * keys);
  }
}

TEST(reserve_makes_room_for_that_many_and_keeps_what_is_there) {
  const Slots slots(2);
  const Layout layout(12, slots);
  Chunks chunks(layout.row_bytes);
  SlotTable table(layout, Slot{1}, chunks);
  Rows rows;
  insert(table, rows, kFirst, 12, 1);
  table.reserve(10'000);
  CHECK(table.has_room(9'999));
  check_same(table, rows, 12);
  const std::size_t bytes = table.bytes();
  std::mt19937_64 random(5);
  while (rows.size() < 10'000) {
    insert(table, rows, random() | kFirst, 12, 2);
  }
  CHECK_EQ(table.bytes(), bytes);
  check_same(table, rows, 12);
}

TEST(verify_names_a_broken_invariant) {
  const Slots slots(2);
  const Layout layout(8, slots);
  const auto broken = [&](const std::function<void(std::byte*)>& damage) {
    Chunks chunks(layout.row_bytes);
    SlotTable table(layout, Slot{1}, chunks);
    table.reserve(100);
    std::byte* const row =
        table.insert(kFirst);  // the first cell of the first bucket, whose payloads start at 32
    damage(row - 32);
    return table.verify();
  };
  const auto put = [](std::byte* line, std::size_t cell, std::uint64_t value) {
    std::memcpy(line + cell * 8, &value, 8);
  };
  CHECK_EQ(broken([](std::byte*) {}), 0);
  CHECK_EQ(broken([&](std::byte* line) { put(line, 2, kFirst + 1); }), 1);
  CHECK_EQ(broken([&](std::byte* line) { put(line, 0, 1); }), 2);
  CHECK_EQ(broken([&](std::byte* line) { put(line, 1, kFirst); }), 2);
  CHECK_EQ(broken([&](std::byte* line) { put(line, 0, ~std::uint64_t{0}); }), 3);
  CHECK_EQ(broken([&](std::byte* line) { put(line, 0, 0); }), 4);
}

TEST(verify_names_a_passed_bucket_that_does_not_say_so) {
  const Layout layout(8, Slots(8));
  SlotTable table(layout, Slot{4});
  table.reserve(100);
  std::byte* line = nullptr;
  for (std::uint64_t k = 0; k < 6; ++k) {  // of one home, which is full after four
    std::byte* const row = table.insert(kFirst + k);
    line = k == 0 ? row - 32 : line;
  }
  CHECK_EQ(table.verify(), 0);
  std::uint64_t last = 0;
  std::memcpy(&last, line + 24, 8);
  CHECK(PassedBits::says(last, PassedBits(Slots(8)).home));
  last = (kFirst + 3) | 0xe000000000000000U;
  std::memcpy(line + 24, &last, 8);
  CHECK_EQ(table.verify(), 3);
}

}  // namespace
}  // namespace shoal::slot_table_test
