// Slabs compared with a plain list of rows, and the memory that they release.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "table/slab.h"

namespace shoal::slab_test {
namespace {

void write(const Slab& slab, std::size_t number, std::size_t row_bytes, std::uint64_t what) {
  std::byte* const row = slab.row(static_cast<std::uint32_t>(number));
  for (std::size_t b = 0; b + 4 <= row_bytes; b += 4) {
    const auto word = static_cast<std::uint32_t>(what + b);
    std::memcpy(row + b, &word, sizeof word);
  }
}

bool holds(const Slab& slab, std::size_t number, std::size_t row_bytes, std::uint64_t what) {
  const std::byte* const row = slab.row(static_cast<std::uint32_t>(number));
  for (std::size_t b = 0; b + 4 <= row_bytes; b += 4) {
    std::uint32_t word;
    std::memcpy(&word, row + b, sizeof word);
    if (word != static_cast<std::uint32_t>(what + b)) {
      return false;
    }
  }
  return true;
}

TEST(rows_keep_their_bytes_while_slabs_that_share_chunks_grow_and_shrink) {
  for (const std::size_t row_bytes : {20UL, 68UL, 128UL, 512UL, 4100UL, 16384UL, 49'164UL}) {
    std::mt19937 random(static_cast<unsigned>(row_bytes));
    Chunks chunks(row_bytes);
    constexpr std::size_t kSlabs = 5;
    std::vector<Slab> slabs;
    for (std::size_t s = 0; s < kSlabs; ++s) {
      slabs.emplace_back(chunks);
    }
    std::vector<std::vector<std::uint64_t>> wanted(kSlabs);
    const std::size_t most = 5 * chunks.rows();
    for (std::size_t turn = 0; turn < 60; ++turn) {
      Slab& slab = slabs[turn % kSlabs];
      std::vector<std::uint64_t>& rows = wanted[turn % kSlabs];
      const std::size_t next = random() % (most + 1);
      if (next > rows.size()) {
        slab.make_room(next, next + random() % 10);
        CHECK(slab.rows() >= next);
        while (rows.size() < next) {
          rows.push_back(random());
          write(slab, rows.size() - 1, row_bytes, rows.back());
        }
      } else {
        slab.cut(next);
        rows.resize(next);
        CHECK(slab.rows() >= next);
      }
      CHECK(slab.bytes() >= rows.size() * row_bytes);
      CHECK(rows.size() >= chunks.rows() || slab.bytes() <= 2 * chunks.bytes());
      for (std::size_t s = 0; s < kSlabs; ++s) {
        for (std::size_t i = 0; i < wanted[s].size(); ++i) {
          CHECK(holds(slabs[s], i, row_bytes, wanted[s][i]));
        }
      }
    }
  }
}

TEST(an_empty_slab_has_no_rows_and_takes_no_bytes) {
  Chunks chunks(128);
  Slab slab(chunks);
  CHECK_EQ(slab.rows(), 0UL);
  CHECK_EQ(slab.bytes(), 0UL);
  slab.make_room(1, 1);
  CHECK_EQ(slab.bytes(), 128UL);
  slab.make_room(10'000, 20'000);
  CHECK(slab.bytes() >= 1'280'000UL && slab.bytes() < 1'280'000UL + chunks.bytes());
  slab.cut(0);
  CHECK_EQ(slab.rows(), 0UL);
  CHECK_EQ(slab.bytes(), 0UL);
}

TEST(chunks_are_distinct_and_come_again_once_given_back) {
  Chunks chunks(128);
  std::vector<std::byte*> taken;
  std::set<std::byte*> seen;
  for (std::size_t i = 0; i < 1000; ++i) {
    taken.push_back(chunks.take());
    std::memset(taken.back(), static_cast<int>(i), chunks.bytes());
    CHECK(seen.insert(taken.back()).second);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(taken.back()) % kCacheLine, 0UL);
  }
  std::shuffle(taken.begin(), taken.end(), std::mt19937(1));
  for (std::size_t i = 0; i < 500; ++i) {
    chunks.give(taken.back());
    taken.pop_back();
  }
  for (const std::byte* const chunk : taken) {  // those that stay were not forgotten
    CHECK_EQ(chunk[0], chunk[chunks.bytes() - 1]);
  }
  std::set<std::byte*> held(taken.begin(), taken.end());
  for (std::size_t i = 0; i < 500; ++i) {
    std::byte* const again = chunks.take();
    CHECK(held.insert(again).second);
    std::memset(again, 1, chunks.bytes());
  }
  for (std::byte* const chunk : held) {
    chunks.give(chunk);
  }
  chunks.give(chunks.take());  // from a block of its own, which goes and comes
}

}  // namespace
}  // namespace shoal::slab_test
