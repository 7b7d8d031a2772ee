// Layout: the sizes of a row and of a bucket's parts, in bytes. It does not know what the columns mean.
//
//   row [ column 0: dim weights of the storage dtype, padded to 4 bytes | columns 1..: dim float32 each
//       | row state ]
//   bucket  one cache line: `cells` hashes of 8 bytes, then as many payloads
//
//   narrow (row <= 16 bytes)   the payload is the row            4 B: 5 cells   8 B: 4   12 B: 3   16 B: 2
//   wide                       the payload is a row number of 4 bytes, of a row in the slot's slab: 5 cells
//
// FTRL's (z, n) at dim 1 is 8 bytes: four (hash, z, n) fill a line of 64 bytes, so a full table takes 16
// bytes per key.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/memory.h"
#include "base/mix.h"
#include "base/simd.h"

namespace shoal {

struct Layout {
  static constexpr std::size_t kMinRowBytes = 4;
  static constexpr std::size_t kMaxNarrowBytes = 16;

  Layout(std::size_t row, Slots cut)
      : row_bytes(row),
        narrow(row <= kMaxNarrowBytes),
        payload_bytes(narrow ? row : sizeof(std::uint32_t)),
        cells(kCacheLine / (sizeof(std::uint64_t) + payload_bytes)),
        slots(cut) {
    SHOAL_CHECK(row >= kMinRowBytes && row % 4 == 0,
                "a row takes a multiple of 4 bytes, got " + std::to_string(row));
  }

  std::size_t row_bytes;
  bool narrow;
  std::size_t payload_bytes;
  std::size_t cells;  // per bucket
  Slots slots;
};

// Calls use(std::integral_constant) with the layout's payload_bytes, for code that is compiled for each size.
template <class Use>
SHOAL_INLINE decltype(auto) with_payload_bytes(const Layout& layout, const Use& use) {
  switch (layout.payload_bytes) {
    case 4:
      return use(std::integral_constant<std::size_t, 4>());
    case 8:
      return use(std::integral_constant<std::size_t, 8>());
    case 12:
      return use(std::integral_constant<std::size_t, 12>());
    default:
      return use(std::integral_constant<std::size_t, 16>());
  }
}

}  // namespace shoal
