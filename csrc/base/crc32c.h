// CRC-32C (Castagnoli, RFC 3720 B.4): the checksum of everything that is stored or sent.
//
// crc32c("123456789") == 0xe3069283. Extend: crc32c(b, crc32c(a)) is the checksum of a followed by b.
//
// As fast as memory brings the bytes where the machine multiplies polynomials 512 bits at a time, else by its crc32
// instruction, else by a table.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

// What is stored or sent is the bytes of numbers as they lie in memory, and the formats say little-endian.
static_assert(
    std::endian::native == std::endian::little,
    "checkpoints hold little-endian numbers, which this machine would have to turn around: not supported");

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// Copies `from` to `to`, as long or longer, and returns crc32c(from, before): one pass over memory for both.
std::uint32_t crc32c_copy(std::span<const std::byte> from, std::span<std::byte> to,
                          std::uint32_t before = 0) noexcept;

// The portable twin of the machine's instructions: same results, a table instead. For tests and other machines.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace shoal
