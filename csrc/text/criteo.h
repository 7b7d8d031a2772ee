// Criteo's logs: a label, 13 integers and 26 categories, separated by tabs.
//
// target.h states what a parse does; every value is 1, and values are not written. The keys are full when
// fewer than 39 are left. An integer's key is that of its bucket (docs/readers.md), a negative one's that of
// a text. Lines of a target that is not labelled may begin with a label all the same: the tabs tell.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "text/target.h"

namespace shoal::text {

// The cell of an integer in a table: the leading eight bits of v and the number of bits that follow, monotone
// in v, and v itself below 256. At most one bucket begins inside of a cell, and in most cells none: a search
// that starts there is short and its length predictable.
constexpr std::size_t criteo_cell(std::uint64_t v) noexcept {
  constexpr unsigned kBits = 8;
  if (v < 1U << kBits) {
    return v;
  }
  const unsigned shift = static_cast<unsigned>(std::bit_width(v)) - kBits;
  return (std::size_t{shift} << (kBits - 1)) + (v >> shift);
}

// The buckets of integers, as shoal.data.criteo makes them.
struct CriteoTables {
  static constexpr std::size_t kIntegers = 13;           // columns 1 to 13
  static constexpr std::size_t kCategories = 26;         // columns 14 to 39
  static constexpr std::size_t kSmallIntegers = 10'000;  // integers of up to four digits
  static constexpr std::size_t kCells = criteo_cell(std::numeric_limits<std::int64_t>::max()) + 1;

  std::span<const std::uint64_t> floors;   // ascend from 0 to 2^64 - 1; bucket b ends before floors[b + 1]
  std::span<const std::uint16_t> cells;    // kCells: the bucket of the least integer in each cell
  std::span<const std::uint8_t> small;     // kSmallIntegers: the bucket of each
  std::span<const std::uint64_t> numbers;  // the key of bucket b in integer column c: [(c - 1) * buckets + b]
};

Stop parse_criteo(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip,
                  const CriteoTables& tables) noexcept;

}  // namespace shoal::text
