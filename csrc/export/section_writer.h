// Packing: the rows of a slot as a section of an export.
//
//   section = its lines (export/index_line.h), then its wide rows, then zeros up to a multiple of kCacheLine
//
// Rows that read what a key without a row reads are left out: of a table that starts with zeros, rows of zeros.
//
// Lines are filled to three quarters. Of six lanes, as float32 has them at dim 1 and 1e8 keys, a lookup then reads 1.15 lines
// (0.15 of the keys stand behind their home); at 0.8 it is 1.23, at 0.9 1.65.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mix.h"
#include "export/index_line.h"
#include "export/row_format.h"
#include "optim/init.h"

namespace shoal {

// Where what stands in a section, and how much of it.
struct SectionShape {
  std::uint64_t rows = 0;
  std::uint64_t homes = 0;
  std::uint64_t lines = 0;  // homes, and what stands behind the last of them
  std::uint64_t reach = 0;  // of the hash that is farthest from its home
  std::size_t width = LineFormat::kNarrowest;

  std::size_t bytes(const RowFormat& form) const noexcept {
    const std::size_t behind = form.is_inline() ? 0 : rows * form.bytes();
    return lines * kCacheLine + (behind + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
};

struct PackedSection {
  SectionShape shape;
  std::vector<std::byte> bytes;
  std::uint64_t dropped = 0;  // rows that were left out
  // Of the weights that are read instead of those given: how far they are off.
  double largest_error = 0.0;
  double squared_errors = 0.0;
  double squares = 0.0;  // of the weights given
};

// Ascending hashes of one slot, and dim weights of each. A row whose first weight is NaN says that its key has none any
// more, and is kept.
PackedSection pack(const RowFormat& form, const Init& init, Slots slots, Slot slot,
                   std::span<const std::uint64_t> hashes, std::span<const float> weights);

// Whether a row of these weights reads what its key would read without it. `scratch` is 2 dim numbers, of which the first dim
// are the key's initial row behind it.
bool reads_initial(const RowFormat& form, const Init& init, std::uint64_t hash, const float* weights,
                   std::span<float> scratch);

}  // namespace shoal
