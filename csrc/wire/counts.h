// Encoding of how often each row of a push occurred in its batch.
//
// Algorithm. A variable-length code in three arrays. Nearly all rows of a batch occur once, some a few times,
// very few often: a bit for most, a byte for some, four bytes for the rest. A list of ones is not sent at
// all. Lossless and canonical: each list has one encoding.
//
//   counts   1 1 3 1 700 1 1 1 | 2
//   map      00010100            00000001   a bit per row, the first in the lowest bit: a count above 1
//   small    3 0 2                          a byte for each such row: 2 to 255, or 0 for more
//   large    700                            u32 for each of those zeros
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

// 0 if all are 1: then nothing is sent. Counts must be at least 1.
std::size_t packed_counts_bytes(std::span<const std::uint32_t> counts) noexcept;
// `out` has packed_counts_bytes(counts) bytes.
void pack_counts(std::span<const std::uint32_t> counts, std::span<std::byte> out) noexcept;

// The number of bytes that the packed counts of `rows` rows must have, given their beginning, which is
// untrusted.
std::uint64_t packed_counts_bytes(std::span<const std::byte> packed, std::uint64_t rows) noexcept;
// The inverse of pack_counts(); requires packed_counts_bytes(packed, out.size()) == packed.size(). False if
// the encoding is not canonical: bits after the last row, a byte for 1, or four bytes for less than 256.
bool unpack_counts(std::span<const std::byte> packed, std::span<std::uint32_t> out) noexcept;

}  // namespace shoal
