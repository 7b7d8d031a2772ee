// Section writer: encodes the rows of a slot as a section of an export.
//
//   section = its lines (export/index_line.h), then its wide rows, then zeros up to a multiple of kCacheLine
//
// Rows that equal what a key without a row reads are omitted; in a table with zero initialization these are
// rows of zeros.
//
// Lines are filled to a load factor of 3/4. With six lanes per line (float32, dim 1) a lookup then reads 1.15
// lines on average: 0.15 of the keys are displaced. At a load of 0.8 it is 1.23 lines, at 0.9 1.65.
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

// The dimensions of a section.
struct SectionShape {
  std::uint64_t rows = 0;
  std::uint64_t homes = 0;
  std::uint64_t lines = 0;  // the homes, and the overflow lines after the last home
  std::uint64_t reach = 0;  // the distance of the hash that is farthest from its home
  std::size_t width = LineFormat::kMinRowBytes;

  std::size_t bytes(const RowFormat& form) const noexcept {
    const std::size_t behind = form.is_inline() ? 0 : rows * form.bytes();
    return lines * kCacheLine + (behind + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
};

struct PackedSection {
  SectionShape shape;
  std::vector<std::byte> bytes;
  std::uint64_t dropped = 0;  // rows that were omitted
  // The quantization errors: stored weights against the given ones.
  double largest_error = 0.0;
  double squared_errors = 0.0;
  double squares = 0.0;  // the sum of the given weights' squares
};

// Encodes ascending hashes of one slot with dim weights each. A row whose first weight is NaN marks a removed
// key, and is kept.
PackedSection pack(const RowFormat& form, const Init& init, Slots slots, Slot slot,
                   std::span<const std::uint64_t> hashes, std::span<const float> weights);

// Whether these weights, once stored, equal the key's initial row. `scratch` has 2 dim elements; afterwards
// the first dim are the initial row.
bool reads_initial(const RowFormat& form, const Init& init, std::uint64_t hash, const float* weights,
                   std::span<float> scratch);

}  // namespace shoal
