// Digest: names a list of hashes on the wire.
//
// MurmurHash3 x64 128 (Appleby, public domain) of the hashes as bytes, seeded by the job's number. Two
// different lists collide by accident with probability 2^-128. It is not a cryptographic hash: a worker that
// may push can also send wrong data.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

struct Digest {
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  static constexpr std::size_t kBytes = 16;
  // From its kBytes bytes on the wire.
  static Digest read(std::span<const std::byte> bytes) noexcept;

  friend bool operator==(const Digest&, const Digest&) = default;
};

Digest digest(std::span<const std::uint64_t> hashes, std::uint32_t seed) noexcept;

}  // namespace shoal
