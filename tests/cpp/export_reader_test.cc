// Exported sections compared with a plain map: lookups, layers, reading back, differences.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "base/intrinsics.h"
#include "base/memory.h"
#include "base/mix.h"
#include "base/threads.h"
#include "check.h"
#include "export/export_reader.h"

namespace shoal::export_reader_test {
namespace {

using Rows = std::map<std::uint64_t, std::vector<float>>;  // by hash

// A table over sections that it keeps.
struct Table {
  ExportReader reader;
  std::vector<std::unique_ptr<Region>> memory = {};

  void add(const Rows& rows) {
    reader.add_layer();
    for (std::size_t s = 0; s < reader.slots().count(); ++s) {
      const Slot slot{static_cast<std::uint32_t>(s)};
      std::vector<std::uint64_t> hashes;
      std::vector<float> weights;
      for (const auto& [hash, row] : rows) {
        if (reader.slots().of(hash) == slot) {
          hashes.push_back(hash);
          weights.insert(weights.end(), row.begin(), row.end());
        }
      }
      const PackedSection packed = reader.pack(slot, hashes, weights);
      if (packed.shape.rows != 0) {
        memory.push_back(std::make_unique<Region>(packed.bytes.size()));
        std::memcpy(memory.back()->data(), packed.bytes.data(), packed.bytes.size());
        reader.add(slot, packed.shape, {memory.back()->data(), packed.bytes.size()});
      }
    }
  }
};

Table make(const std::string& dtype, std::size_t dim, std::size_t slots, bool by_simd = has_simd()) {
  return {ExportReader(RowFormat(dtype, dim, by_simd), Init("Zeros", 0.0, 0), Slots(slots))};
}

// The decoders of this machine: the portable one, and that by intrinsics if available.
std::vector<bool> ways() { return has_simd() ? std::vector{false, true} : std::vector{false}; }

Rows random_rows(std::size_t count, std::size_t dim, unsigned seed, bool close) {
  std::mt19937_64 random(seed);
  Rows rows;
  while (rows.size() < count) {
    const std::uint64_t hash = close ? (std::uint64_t{7} << 61U) + random() % (4 * count) : random();
    std::vector<float> row(dim);
    for (float& weight : row) {
      weight = static_cast<float>(1 + random() % 100) / 8.0F;  // which every dtype but int8 has
    }
    rows[hash] = row;
  }
  return rows;
}

void check_reads(const Table& table, const Rows& rows, std::size_t dim) {
  ThreadPool pool(1);
  std::vector<std::uint64_t> asked;
  for (const auto& entry : rows) {
    asked.push_back(entry.first);
    asked.push_back(entry.first + 1);
  }
  asked.insert(asked.end(), {0, std::numeric_limits<std::uint64_t>::max()});
  std::vector<float> got(asked.size() * dim, -1.0F);
  std::vector<std::uint8_t> there(asked.size());
  table.reader.pull(asked, ExportReader::KeyKind::kHash, got, pool);
  table.reader.contains(asked, ExportReader::KeyKind::kHash, there, pool);
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const auto found = rows.find(asked[i]);
    CHECK_EQ(there[i] != 0, found != rows.end());
    for (std::size_t e = 0; e < dim; ++e) {
      CHECK_EQ(got[i * dim + e], found == rows.end() ? 0.0F : found->second[e]);
    }
  }
  std::size_t read = 0;
  for (std::size_t s = 0; s < table.reader.slots().count(); ++s) {
    std::vector<std::uint64_t> hashes;
    std::vector<float> weights;
    table.reader.read_slot(Slot{static_cast<std::uint32_t>(s)}, hashes, weights);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      const std::vector<float>& want = rows.at(hashes[i]);
      CHECK(std::equal(want.begin(), want.end(), weights.begin() + static_cast<std::ptrdiff_t>(i * dim)));
    }
    read += hashes.size();
  }
  CHECK_EQ(read, rows.size());
}

TEST(every_hash_is_found_and_no_other_scattered_or_close_together) {
  for (const std::string dtype : {"float32", "float16", "bfloat16"}) {
    for (const std::size_t dim : {1UL, 2UL, 7UL, 16UL}) {
      for (const std::size_t count : {1UL, 5UL, 700UL, 5000UL}) {
        for (const bool close : {false, true}) {
          for (const bool by_simd : ways()) {
            Table table = make(dtype, dim, 8, by_simd);
            const Rows rows = random_rows(count, dim, static_cast<unsigned>(count + dim), close);
            table.add(rows);
            check_reads(table, rows, dim);
          }
        }
      }
    }
  }
}

TEST(slots_of_one_layer_may_store_hashes_in_different_widths) {
  for (const std::size_t dim : {1UL, 16UL}) {
    for (const bool by_simd : ways()) {
      Table table = make("float16", dim, 8, by_simd);
      Rows rows;
      std::mt19937_64 random(4);
      for (std::uint64_t slot = 0; slot < 7; ++slot) {
        for (std::size_t k = 0; k < std::size_t{1} << (2 * slot); ++k) {
          rows[slot << 61U | random() >> 3U] = std::vector<float>(dim, static_cast<float>(1 + random() % 9));
        }
      }
      table.add(rows);
      check_reads(table, rows, dim);
    }
  }
}

// The low 32 bits of many hashes of a line are the same: the others tell them apart.
TEST(hashes_that_agree_in_their_low_bits_are_told_apart) {
  for (const bool by_simd : ways()) {
    Table table = make("float32", 1, 2, by_simd);
    Rows rows;
    for (std::uint64_t k = 0; k < 2000; ++k) {
      rows[k << 32U] = {static_cast<float>(k + 1)};
    }
    table.add(rows);
    check_reads(table, rows, 1);
    ThreadPool pool(1);
    const std::vector<std::uint64_t> absent{2001ULL << 32U, 0x123ULL << 52U, 1ULL << 31U};
    std::vector<float> got(absent.size());
    table.reader.pull(absent, ExportReader::KeyKind::kHash, got, pool);
    CHECK_EQ(got, std::vector<float>(absent.size(), 0.0F));
  }
}

// Lines of up to 11 lanes, as large tables have them: here by way of one slot of many.
TEST(narrow_hashes_are_found_in_every_lane) {
  const Slot slot{5};
  for (const auto& [count, width] : {std::pair{std::size_t{700}, 6UL}, {std::size_t{50'000}, 5UL}}) {
    for (const std::size_t dim : {1UL, 16UL}) {
      std::mt19937_64 random(count);
      std::vector<std::uint64_t> hashes(count);
      for (std::uint64_t& hash : hashes) {
        hash = std::uint64_t{5} << 50U | random() >> 14U;
      }
      std::sort(hashes.begin(), hashes.end());
      hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
      std::vector<float> weights(hashes.size() * dim);
      for (float& weight : weights) {
        weight = static_cast<float>(1 + random() % 100) / 8.0F;
      }
      for (const bool by_simd : ways()) {
        Table table = make("float16", dim, 16384, by_simd);
        const PackedSection packed = table.reader.pack(slot, hashes, weights);
        CHECK_EQ(packed.shape.width, width);
        const Region memory = [&] {
          Region copy(packed.bytes.size());
          std::memcpy(copy.data(), packed.bytes.data(), packed.bytes.size());
          return copy;
        }();
        table.reader.add_layer();
        table.reader.add(slot, packed.shape, {memory.data(), packed.bytes.size()});
        ThreadPool pool(1);
        std::vector<float> got(weights.size());
        table.reader.pull(hashes, ExportReader::KeyKind::kHash, got, pool);
        CHECK(got == weights);
        std::vector<std::uint64_t> absent;
        for (const std::uint64_t hash : hashes) {
          if (!std::binary_search(hashes.begin(), hashes.end(), hash ^ 1U << 20U)) {
            absent.push_back(hash ^ 1U << 20U);
          }
        }
        std::vector<std::uint8_t> there(absent.size(), 1);
        table.reader.contains(absent, ExportReader::KeyKind::kHash, there, pool);
        CHECK(std::none_of(there.begin(), there.end(), [](std::uint8_t one) { return one != 0; }));
      }
    }
  }
}

TEST(both_ways_of_reading_give_the_same_bits_whatever_stands_in_a_section) {
  if (!has_simd()) {
    return;
  }
  for (const std::string dtype : {"float32", "float16", "bfloat16", "int8"}) {
    for (const std::size_t dim : {1UL, 2UL, 3UL, 8UL, 16UL, 32UL, 37UL, 64UL}) {
      std::mt19937_64 random(dim);
      const Slots slots(2);
      const Rows rows = random_rows(3000, dim, 7, false);
      Table portable = make(dtype, dim, 2, false);
      Table wide = make(dtype, dim, 2, true);
      std::vector<std::uint64_t> asked;
      for (const auto& entry : rows) {
        asked.push_back(entry.first);
        asked.push_back(random());
      }
      for (int layer = 0; layer < 2; ++layer) {
        portable.add(rows);
        wide.reader.add_layer();
        for (std::uint32_t s = 0; s < 2; ++s) {
          std::vector<std::uint64_t> hashes;
          std::vector<float> weights;
          for (const auto& [hash, row] : rows) {
            if (slots.of(hash) == Slot{s}) {
              hashes.push_back(hash);
              weights.insert(weights.end(), row.begin(), row.end());
            }
          }
          const SectionShape shape = portable.reader.pack(Slot{s}, hashes, weights).shape;
          // The same bytes, damaged: both readers read the copy of portable.add().
          Region& memory = *portable.memory[portable.memory.size() - 2 + s];
          for (std::size_t k = 0; k < shape.bytes(portable.reader.form()) / 50; ++k) {
            memory.data()[random() % shape.bytes(portable.reader.form())] = static_cast<std::byte>(random());
          }
          wide.reader.add(Slot{s}, shape, {memory.data(), shape.bytes(portable.reader.form())});
        }
      }
      ThreadPool pool(2);
      std::vector<float> left(asked.size() * dim, -1.0F);
      std::vector<float> right(asked.size() * dim, -2.0F);
      portable.reader.pull(asked, ExportReader::KeyKind::kHash, left, pool);
      wide.reader.pull(asked, ExportReader::KeyKind::kHash, right, pool);
      CHECK(std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0);
    }
  }
}

// The rows of one slot of many, whose hashes have the width that large tables have: then rows are widened in
// the loop that probes. Present, displaced, absent and removed keys, in batches that end anywhere in a run;
// in `damaged` sections too.
TEST(rows_that_are_widened_while_others_are_probed_read_as_by_the_portable_code) {
  const Slot slot{5};
  for (const auto& [init, parameter] : {std::pair{"Zeros", 0.0}, {"Constant", 0.1}, {"Normal", 0.01}}) {
    for (const std::string dtype : {"float32", "float16", "bfloat16", "int8"}) {
      for (const std::size_t dim : {8UL, 16UL, 17UL, 32UL, 64UL}) {
        for (const bool damaged : {false, true}) {
          std::mt19937_64 random(dim);
          std::vector<std::uint64_t> hashes(700);
          std::vector<std::uint64_t> asked;
          for (std::uint64_t& hash : hashes) {
            hash = std::uint64_t{5} << 50U | random() >> 14U;
          }
          std::sort(hashes.begin(), hashes.end());
          std::vector<float> weights(hashes.size() * dim);
          for (float& weight : weights) {
            weight = static_cast<float>(1 + random() % 100) / 8.0F;
          }
          for (std::size_t i = 0; i < hashes.size(); ++i) {
            weights[i * dim] = i % 7 == 3 ? std::numeric_limits<float>::quiet_NaN() : weights[i * dim];
            asked.insert(asked.end(), {hashes[i], hashes[hashes.size() - 1 - i], hashes[i] ^ 1U << 20U});
          }
          std::shuffle(asked.begin(), asked.end(), random);
          std::vector<std::vector<float>> read;
          const auto make_reader = [&](bool by_simd) {
            return ExportReader(RowFormat(dtype, dim, by_simd), Init(init, parameter, 3), Slots(16384));
          };
          const PackedSection packed = make_reader(false).pack(slot, hashes, weights);
          CHECK_EQ(packed.shape.width, 6UL);
          Region memory(packed.bytes.size());
          std::memcpy(memory.data(), packed.bytes.data(), packed.bytes.size());
          for (std::size_t k = 0; damaged && k < packed.bytes.size() / 50; ++k) {
            memory.data()[random() % packed.bytes.size()] = static_cast<std::byte>(random());
          }
          for (const bool by_simd : ways()) {
            ExportReader reader = make_reader(by_simd);
            reader.add_layer();
            reader.add(slot, packed.shape, {memory.data(), packed.bytes.size()});
            ThreadPool pool(1);
            read.emplace_back(asked.size() * dim, -1.0F);
            std::size_t first = 0;
            for (const std::size_t size : {1UL, 31UL, 32UL, 33UL, 129UL, 160UL, 191UL, 224UL}) {
              reader.pull(std::span(asked).subspan(first, size), ExportReader::KeyKind::kHash,
                          std::span(read.back()).subspan(first * dim, size * dim), pool);
              first += size;
            }
            reader.pull(std::span(asked).subspan(first), ExportReader::KeyKind::kHash,
                        std::span(read.back()).subspan(first * dim), pool);
          }
          CHECK(std::memcmp(read.front().data(), read.back().data(), read.front().size() * sizeof(float)) ==
                0);
          if (damaged || dtype == "int8") {  // int8 is not exact
            continue;
          }
          for (std::size_t k = 0; k < asked.size(); ++k) {
            std::vector<float> expected(dim);
            Init(init, parameter, 3).fill(asked[k], dim, expected.data());
            const auto at = std::lower_bound(hashes.begin(), hashes.end(), asked[k]) - hashes.begin();
            const auto i = static_cast<std::size_t>(at);
            if (i < hashes.size() && hashes[i] == asked[k] && i % 7 != 3) {
              std::copy_n(weights.begin() + static_cast<std::ptrdiff_t>(i * dim), dim, expected.begin());
            }
            CHECK(std::equal(expected.begin(), expected.end(),
                             read.back().begin() + static_cast<std::ptrdiff_t>(k * dim)));
          }
        }
      }
    }
  }
}

TEST(every_number_of_16_bits_is_widened_as_half_h_does) {
  for (const std::string dtype : {"float16", "bfloat16"}) {
    for (const bool by_simd : ways()) {
      const RowFormat form(dtype, 19, by_simd);
      for (std::uint32_t first = 0; first < 65536; first += 19) {
        std::array<std::uint16_t, 19> row;
        for (std::uint32_t e = 0; e < 19; ++e) {
          row[e] = static_cast<std::uint16_t>(first + e);
        }
        std::array<float, 19> read;
        form.decode(reinterpret_cast<const std::byte*>(row.data()), read.data());
        for (std::size_t e = 0; e < 19; ++e) {
          const float want = dtype == "float16" ? from_float16(row[e]) : from_bfloat16(row[e]);
          CHECK(std::memcmp(&want, &read[e], sizeof want) == 0);
        }
      }
    }
  }
}

// Within ranges the difference is the part of the whole difference that lies in them.
void check_difference_within(const ExportReader& reader, Slot slot,
                             std::span<const ExportReader::HashRange> within,
                             std::span<const std::uint64_t> hashes, std::span<const float> weights) {
  const std::size_t dim = reader.form().dim();
  using Part = std::pair<std::vector<std::uint64_t>,
                         std::vector<std::uint32_t>>;  // rows as bits: removed ones are NaN
  const auto part = [&](std::span<const std::uint64_t> all, std::span<const float> rows) {
    Part some;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint64_t place = all[i] << reader.slots().bits();
      if (std::ranges::any_of(within,
                              [&](const auto& at) { return at.first <= place && place <= at.last; })) {
        some.first.push_back(all[i]);
        for (const float weight : rows.subspan(i * dim, dim)) {
          some.second.push_back(std::bit_cast<std::uint32_t>(weight));
        }
      }
    }
    return some;
  };
  std::vector<std::uint64_t> differ;
  std::vector<float> values;
  reader.difference(slot, hashes, weights, differ, values);
  const Part expected = part(differ, values);
  const Part given = part(hashes, weights);
  std::vector<float> rows(given.second.size());
  std::ranges::transform(given.second, rows.begin(),
                         [](std::uint32_t bits) { return std::bit_cast<float>(bits); });
  reader.difference(slot, given.first, rows, differ, values, within);
  CHECK(part(differ, values) == expected);
  CHECK_EQ(differ.size(), expected.first.size());
}

TEST(a_difference_laid_over_its_base_reads_as_the_rows_of_now) {
  for (const std::size_t dim : {1UL, 5UL}) {
    Table table = make("float16", dim, 4);
    Rows rows = random_rows(900, dim, 3, false);
    table.add(rows);
    std::mt19937 random(5);
    for (int version = 0; version < 4; ++version) {
      Rows now = random_rows(60, dim, static_cast<unsigned>(10 + version), version % 2 == 1);
      for (const auto& [hash, row] : rows) {
        if (random() % 5 != 0) {
          now[hash] = row;
        }
      }
      Rows changed;
      // Some parts of each slot, now and then all of it or none.
      std::vector<ExportReader::HashRange> within;
      for (std::uint64_t first = 0; first < 256; ++first) {
        if (random() % 4 <= static_cast<unsigned>(version)) {
          within.push_back({first << 56U, ((first + 1) << 56U) - 1});
        }
      }
      for (std::size_t s = 0; s < 4; ++s) {
        const Slot slot{static_cast<std::uint32_t>(s)};
        std::vector<std::uint64_t> hashes;
        std::vector<std::uint64_t> differ;
        std::vector<float> weights;
        std::vector<float> values;
        for (const auto& [hash, row] : now) {
          if (table.reader.slots().of(hash) == slot) {
            hashes.push_back(hash);
            weights.insert(weights.end(), row.begin(), row.end());
          }
        }
        table.reader.difference(slot, hashes, weights, differ, values);
        check_difference_within(table.reader, slot, within, hashes, weights);
        for (std::size_t i = 0; i < differ.size(); ++i) {
          const auto first = values.begin() + static_cast<std::ptrdiff_t>(i * dim);
          changed[differ[i]] = std::vector<float>(first, first + static_cast<std::ptrdiff_t>(dim));
        }
      }
      CHECK(changed.size() < now.size());
      table.add(changed);
      check_reads(table, now, dim);
      rows = now;
    }
  }
}

TEST(int8_is_off_by_half_a_step_at_most) {
  const RowFormat form("int8", 4);
  const float weights[] = {-3.0F, 0.1F, 2.0F, 1e-7F};
  std::byte row[6];
  float read[4];
  form.encode(weights, row);
  form.decode(row, read);
  for (std::size_t e = 0; e < 4; ++e) {
    CHECK(std::abs(weights[e] - read[e]) <= form.half_step(row, 0.0F));
  }
  CHECK(!form.is_removed(row));
  form.encode_removed(row);
  CHECK(form.is_removed(row));
}

}  // namespace
}  // namespace shoal::export_reader_test
