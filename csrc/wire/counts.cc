#include "wire/counts.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "wire/values.h"

namespace shoal {

namespace {

constexpr std::uint32_t kLarge = 256;  // the least count that does not fit into a byte

}  // namespace

std::size_t packed_counts_bytes(std::span<const std::uint32_t> counts) noexcept {
  std::size_t kept = 0;
  std::size_t large = 0;
  for (const std::uint32_t count : counts) {
    kept += count != 1 ? 1U : 0U;
    large += count >= kLarge ? 1U : 0U;
  }
  return kept == 0 ? 0 : map_bytes(counts.size()) + kept + large * sizeof(std::uint32_t);
}

void pack_counts(std::span<const std::uint32_t> counts, std::span<std::byte> out) noexcept {
  const auto map = out.first(map_bytes(counts.size()));
  std::byte* small = out.data() + map.size();
  for (std::size_t byte = 0; byte < map.size(); ++byte) {
    const std::size_t first = byte * 8;
    const std::size_t size = std::min<std::size_t>(8, counts.size() - first);
    unsigned bits = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const std::uint32_t count = counts[first + i];
      if (count != 1) {
        bits |= 1U << i;
        *small++ = static_cast<std::byte>(count < kLarge ? count : 0);
      }
    }
    map[byte] = static_cast<std::byte>(bits);
  }
  std::byte* large = small;
  for (const std::uint32_t count : counts) {
    if (count >= kLarge) {
      std::memcpy(large, &count, sizeof count);
      large += sizeof count;
    }
  }
}

std::uint64_t packed_counts_bytes(std::span<const std::byte> packed, std::uint64_t rows) noexcept {
  const std::uint64_t map = map_bytes(rows);
  if (packed.size() < map) {
    return map;
  }
  const std::uint64_t kept = count_kept(packed.first(map));
  if (packed.size() < map + kept) {
    return map + kept;
  }
  const auto small = packed.subspan(map, kept);
  const auto large = static_cast<std::uint64_t>(std::count(small.begin(), small.end(), std::byte{0}));
  return map + kept + large * sizeof(std::uint32_t);
}

bool unpack_counts(std::span<const std::byte> packed, std::span<std::uint32_t> out) noexcept {
  const auto map = packed.first(map_bytes(out.size()));
  if (!is_map(map, out.size())) {
    return false;
  }
  const std::byte* small = packed.data() + map.size();
  const std::byte* large = small + count_kept(map);
  bool good = true;
  std::fill(out.begin(), out.end(), 1U);
  for (std::size_t byte = 0; byte < map.size(); ++byte) {
    for (auto bits = std::to_integer<unsigned>(map[byte]); bits != 0; bits &= bits - 1) {
      auto count = std::to_integer<std::uint32_t>(*small++);
      good &= count != 1;
      if (count == 0) {
        std::memcpy(&count, large, sizeof count);
        large += sizeof count;
        good &= count >= kLarge;
      }
      out[byte * 8 + static_cast<std::size_t>(std::countr_zero(bits))] = count;
    }
  }
  return good;
}

}  // namespace shoal
