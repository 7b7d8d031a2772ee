// LineFormat: the layout of an export's index, cache lines of hashes in hash order (docs/export-format.md).
//
// Algorithm. An immutable interpolation-ordered hash table with linear overflow: a section holds the rows of
// one slot; the home of a hash is the line scale(hash << slots.bits(), homes). A hash that does not fit into
// its home is stored in the next line that has room. Each line records the greatest distance of the hashes
// whose home it is; a lookup reads the home and rarely a line after it.
//
// A hash is not stored in full: the position of the line implies its upper bits. The hashes in a line have
// their homes in it or in one of the `reach` lines before it, an interval of (reach + 1) / homes of the
// slot's hashes, and `width` bytes distinguish any two hashes of that interval. So a match is exact, and the
// hash can be recovered (Homes::hash).
//
// Threads: pure functions.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/memory.h"
#include "base/mix.h"
#include "base/simd.h"
#include "export/row_format.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shoal {

struct LineFormat {
  static constexpr std::size_t kMinRowBytes = 5;  // least width: stored bytes of a hash
  static constexpr std::size_t kMaxDim = 8;       // greatest width: the whole hash
  static constexpr std::size_t kFirstRow = 59;
  static constexpr std::size_t kScale = 61;
  static constexpr std::size_t kReach = 63;
  static constexpr std::uint8_t kFar = 254;
  static constexpr std::uint8_t kEmpty = 255;
  static constexpr std::size_t kMaxLanes = 12;
  static constexpr unsigned kNone = 16;  // no lane

  LineFormat() = default;
  // `row`: bytes of an inline row, 1, 2 or 4; 0 for wide rows. Rows of one byte share the line's scale.
  constexpr LineFormat(std::size_t bytes_of_hash, std::size_t row) noexcept
      : width(bytes_of_hash),
        row_bytes(row),
        lanes((row == 0 ? kFirstRow : (row == 1 ? kScale : kReach)) / (width + row)),
        high_mask(static_cast<std::uint32_t>((std::uint64_t{1} << (8 * (width - 4))) - 1)),
        lane_mask((1U << lanes) - 1),
        last_lane(1U << (lanes - 1)) {}
  LineFormat(const RowFormat& form, std::size_t bytes_of_hash) noexcept
      : LineFormat(bytes_of_hash, form.is_inline() ? form.bytes() : 0) {}

  std::size_t width = kMaxDim;
  std::size_t row_bytes = 0;  // of a row within the line
  std::size_t lanes = 0;
  std::uint32_t high_mask = 0;
  std::uint32_t lane_mask = 0;
  std::uint32_t last_lane = 0;

  constexpr std::size_t high_at(std::size_t lane) const noexcept { return 4 * lanes + lane * (width - 4); }
  constexpr std::size_t row_at(std::size_t lane) const noexcept { return width * lanes + lane * row_bytes; }

  // The stored bits of a lane's hash, its low ones.
  std::uint64_t stored(const std::byte* line, std::size_t lane) const noexcept {
    std::uint32_t low;
    std::uint32_t high;
    std::memcpy(&low, line + 4 * lane, sizeof low);
    std::memcpy(&high, line + high_at(lane), sizeof high);  // within the line for every width
    return (std::uint64_t{high & high_mask} << 32U) | low;
  }

  // The lane of a hash, or kNone.
  SHOAL_INLINE unsigned find(const std::byte* line, std::uint64_t hash) const noexcept {
    unsigned match = same_low(line, static_cast<std::uint32_t>(hash)) & lane_mask;
    const std::uint32_t wanted = static_cast<std::uint32_t>(hash >> 32U) & high_mask;
    while (match != 0) {
      const auto lane = static_cast<unsigned>(std::countr_zero(match));
      std::uint32_t high;
      std::memcpy(&high, line + 4 * lanes + lane * (width - 4), sizeof high);
      if ((high & high_mask) == wanted) [[likely]] {
        return lane;
      }
      match &= match - 1;
    }
    return kNone;
  }

  // Bit k: the k-th 32 bits of a line equal `low`. All sixteen words are compared, including those that hold
  // no hash.
  static SHOAL_INLINE unsigned same_low(const std::byte* line, std::uint32_t low) noexcept {
#if defined(__SSE2__)
    const auto* const at = reinterpret_cast<const __m128i*>(line);
    const __m128i wanted = _mm_set1_epi32(static_cast<int>(low));
    const __m128i first = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_load_si128(at), wanted),
                                          _mm_cmpeq_epi32(_mm_load_si128(at + 1), wanted));
    const __m128i second = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_load_si128(at + 2), wanted),
                                           _mm_cmpeq_epi32(_mm_load_si128(at + 3), wanted));
    return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(first, second)));
#else
    unsigned match = 0;
    for (std::size_t k = 0; k < 16; ++k) {
      std::uint32_t word;
      std::memcpy(&word, line + 4 * k, sizeof word);
      match |= static_cast<unsigned>(word == low) << k;
    }
    return match;
#endif
  }
};

// The home lines of a slot's hashes.
struct Homes {
  Slots slots;
  std::uint64_t count;  // of home lines

  std::uint64_t of(std::uint64_t hash) const noexcept { return scale(hash << slots.bits(), count); }

  // The least hash of a slot whose home is line `home` or a later one.
  std::uint64_t first_hash(Slot slot, std::uint64_t home) const noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide place = ((static_cast<Wide>(home) << 64U) + count - 1) / count;
    const Wide unit = Wide{1} << slots.bits();
    return slots.first_hash(slot) + static_cast<std::uint64_t>((place + unit - 1) >> slots.bits());
  }

  // Whether `width` bytes distinguish all hashes that one line may hold, if none is farther than `reach` from
  // its home.
  bool are_distinct(std::size_t width, std::uint64_t reach) const noexcept {
    if (width >= LineFormat::kMaxDim) {
      return true;
    }
    __extension__ using Wide = unsigned __int128;
    if (reach >= count) {
      reach = count - 1;
    }
    const Wide places = ((static_cast<Wide>(reach) + 1) << 64U) / count + 2;
    return (places >> slots.bits()) + 2 <= (Wide{1} << (8 * width));
  }

  // The least hash that a line may hold.
  std::uint64_t least(Slot slot, std::uint64_t line, std::uint64_t reach) const noexcept {
    return first_hash(slot, line > reach ? line - reach : 0);
  }
  // The hash whose low `width` bytes are `stored`, in a line in which no hash is less than `least`.
  static std::uint64_t hash(std::uint64_t least, std::size_t width, std::uint64_t stored) noexcept {
    if (width >= LineFormat::kMaxDim) {
      return stored;
    }
    const std::uint64_t mask = (std::uint64_t{1} << (8 * width)) - 1;
    return least + ((stored - least) & mask);
  }
};

}  // namespace shoal
