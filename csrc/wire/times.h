// Encoding of how long a server took for a request: the aux of a reply with the flag kTimed.
//
// Algorithm. Two floating-point numbers of 16 bits, without sign: m * 2^e nanoseconds, with e in the upper
// five bits and m in the lower eleven. Below 2048 ns they are exact, above they are at most 1/1024 too small;
// the largest is 73 minutes.
//
//   aux     shard << 16 | server
//   server  from the receipt of the request until the reply was sent, with all waiting for clocks and for
//           backups
//   shard   of that, what was spent in the rows; 0 if they were not used, as by a push that is kept until its
//           clock ends
//
// Threads: pure functions.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "wire/wire.h"

namespace shoal::wire {

struct ServerTimes {
  std::uint64_t server_ns = 0;
  std::uint64_t shard_ns = 0;
};

constexpr std::uint16_t pack_time(std::uint64_t ns) noexcept {
  constexpr int kBits = 11;
  const int e = std::max(0, static_cast<int>(std::bit_width(ns)) - kBits);
  return e > 31 ? std::uint16_t{0xffff}
                : static_cast<std::uint16_t>(ns >> e | static_cast<std::uint64_t>(e) << kBits);
}
constexpr std::uint64_t unpack_time(std::uint16_t packed) noexcept {
  return std::uint64_t{packed & 0x7ffU} << (packed >> 11U);
}

constexpr std::uint32_t pack_times(const ServerTimes& times) noexcept {
  return std::uint32_t{pack_time(times.shard_ns)} << 16U | pack_time(times.server_ns);
}
constexpr ServerTimes unpack_times(std::uint32_t aux) noexcept {
  return {.server_ns = unpack_time(static_cast<std::uint16_t>(aux)),
          .shard_ns = unpack_time(static_cast<std::uint16_t>(aux >> 16U))};
}

// Adds the flag, the times and the new checksum to an encoded header, of a reply that may have them.
void set_times(std::span<std::byte, sizeof(Header)> header, const ServerTimes& times) noexcept;

}  // namespace shoal::wire
