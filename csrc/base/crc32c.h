// CRC-32C (Castagnoli, RFC 3720 B.4): the checksum of everything that is stored or sent.
//
// crc32c("123456789") == 0xe3069283. Extend: crc32c(b, crc32c(a)) is the checksum of a followed by b.
//
// Uses 512-bit polynomial multiplication if the machine has it, which is as fast as reading memory; otherwise
// its crc32 instruction, otherwise a table.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

// Numbers are stored and sent as their bytes in memory, and the formats are little-endian.
static_assert(
    std::endian::native == std::endian::little,
    "checkpoints hold little-endian numbers, which this machine would have to turn around: not supported");

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// Copies `from` to `to`, which is at least as long, and returns crc32c(from, before), in one pass.
std::uint32_t crc32c_copy(std::span<const std::byte> from, std::span<std::byte> to,
                          std::uint32_t before = 0) noexcept;

// Whether this machine has an instruction for it.
bool crc32c_has_instruction() noexcept;

// The portable equivalent, with a table: the same results. For tests and other machines.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace shoal
