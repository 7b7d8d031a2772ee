// How often each row of a push occurred in its batch, as that travels.
//
// Idea. Nearly all rows of a batch occurred once, some a few times, hardly any very often: a bit for most, a byte for
// some, four for the rest. A list of ones alone is not sent at all. Exact, and there is one form for each list.
//
//   counts   1 1 3 1 700 1 1 1 | 2
//   map      00010100            00000001   one bit a row, the first in the lowest bit: whether it is more than 1
//   small    3 0 2                          a byte for each such row: 2 to 255, or 0 for more
//   large    700                            u32 for each of those
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

// 0 where all are 1: then there is nothing to send. Counts are at least 1.
std::size_t packed_counts_bytes(std::span<const std::uint32_t> counts) noexcept;
// `out` has packed_counts_bytes(counts) bytes.
void pack_counts(std::span<const std::uint32_t> counts, std::span<std::byte> out) noexcept;

// How many bytes the packed counts of so many rows have that begin as these do: bytes of anybody's. A packed list that is
// one has as many.
std::uint64_t packed_counts_bytes(std::span<const std::byte> packed, std::uint64_t rows) noexcept;
// The inverse of pack_counts, for bytes of which packed_counts_bytes(packed, out.size()) == packed.size(). False where
// they are not in the one form: bits behind the last row, a byte for 1, or four for less than 256.
bool unpack_counts(std::span<const std::byte> packed, std::span<std::uint32_t> out) noexcept;

}  // namespace shoal
