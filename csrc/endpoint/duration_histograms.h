// DurationHistograms: how long requests took, by op, in four buckets per power of two.
//
// Algorithm. A log-linear histogram (as HdrHistogram, Tene 2012, with two bits of mantissa): the bucket of a
// duration of n ns is its exponent and the two bits below its leading one, so a bucket's bounds differ by at
// most a quarter.
//
//   [0, 256) ns | 256-320 | 320-384 | 384-448 | 448-512 | 512-640 | ... | 2^37 ns (137 s) and more
//
// Invariant
//   I1  The buckets of an op add up to its number of durations, once add() has returned.
//
// Threads: add() by one; the others by any, whose numbers may be one duration apart. No read-modify-write, no
// fence.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "wire/wire.h"

namespace shoal {

class DurationHistograms {
 public:
  static constexpr std::size_t kFirstBits = 8;  // durations below 2^8 ns are one bucket
  static constexpr std::size_t kLastBits = 37;  // so are those from 2^37 ns on
  static constexpr std::size_t kBuckets = 1 + 4 * (kLastBits - kFirstBits) + 1;
  static constexpr std::size_t kOps = static_cast<std::size_t>(wire::kLastOp) + 1;

  void add(wire::Op op, std::uint64_t ns) noexcept {
    Durations& one = ops_[static_cast<std::size_t>(op) < kOps ? static_cast<std::size_t>(op) : 0];
    increase(one.counts[bucket(ns)], 1);
    increase(one.total_ns, ns);
  }

  std::uint64_t count(std::size_t op, std::size_t bucket) const noexcept {
    return ops_[op].counts[bucket].load(std::memory_order_relaxed);
  }
  std::uint64_t total_ns(std::size_t op) const noexcept {
    return ops_[op].total_ns.load(std::memory_order_relaxed);
  }
  // The least duration that a bucket counts.
  static std::uint64_t lower_bound(std::size_t bucket) noexcept {
    if (bucket == 0) {
      return 0;
    }
    const std::size_t exponent = kFirstBits + (bucket - 1) / 4;
    return (4 + (bucket - 1) % 4) << (exponent - 2);
  }
  static std::size_t bucket(std::uint64_t ns) noexcept {
    if (ns >> kFirstBits == 0) {
      return 0;
    }
    if (ns >> kLastBits != 0) {
      return kBuckets - 1;
    }
    const auto exponent = static_cast<std::size_t>(std::bit_width(ns) - 1);
    return 1 + 4 * (exponent - kFirstBits) + ((ns >> (exponent - 2)) & 3U);
  }

 private:
  using Count = std::atomic<std::uint64_t>;
  struct Durations {
    std::array<Count, kBuckets> counts{};
    Count total_ns{0};
  };
  static void increase(Count& count, std::uint64_t n) noexcept {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  std::array<Durations, kOps> ops_{};
};

}  // namespace shoal
