// BucketLines: the memory of a slot's index: buckets of one cache line, the cells of hashes and then their
// payloads; and where the probe sequence of a cell goes (slot_table.cc has the algorithm). Inline, because
// every loop over buckets uses it.
//
// Threads: as the SlotTable's.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/memory.h"
#include "base/mix.h"
#include "base/unaligned.h"
#include "table/layout.h"

namespace shoal {

// The bits of a bucket's last cell that say by being zero that hashes passed it; zero if there are none.
struct PassedBits {
  explicit PassedBits(Slots slots) noexcept
      : home(slots.bits() < 3 ? 0 : std::uint64_t{1} << 62U), later(home >> 1U), both(home | later) {}

  std::uint64_t home;   // from here, their home, to their second buckets
  std::uint64_t later;  // from their second bucket or a later one to the next
  std::uint64_t both;
  // Whether a last cell says so. Its first bit is the one that every cell in use has.
  static bool says(std::uint64_t last, std::uint64_t bit) noexcept {
    constexpr std::uint64_t kInUse = std::uint64_t{1} << 63U;
    return (last & (kInUse | bit)) == kInUse;
  }
};

struct BucketLines {
  // The greatest distance of a second bucket from the home: within a page; greater values do not shorten
  // searches.
  static constexpr std::size_t kReach = 64;

  // The hash that determines a cell's buckets: the cell itself, or in a scrambled slot (scramble != 0) its
  // image under a mix that cannot be inverted without the secret. The slot bits of the result are
  // meaningless.
  static std::uint64_t probe_key(std::uint64_t cell, std::uint64_t scramble, unsigned slot_bits) noexcept {
    return scramble == 0 ? cell : mix((cell << slot_bits) ^ scramble) >> slot_bits;
  }
  std::uint64_t probe_key(std::uint64_t cell) const noexcept {
    return probe_key(cell, scramble, layout->slots.bits());
  }
  std::size_t home(std::uint64_t cell) const noexcept {
    return scale(probe_key(cell) << layout->slots.bits(), count);
  }
  // The second bucket of a hash (not yet reduced modulo the number of buckets).
  static std::size_t second(std::uint64_t key, std::size_t home) noexcept {
    return home + 1 + key % kReach;  // the low bits of a hash, which do not affect its home
  }
  std::size_t second_of(std::uint64_t cell, std::size_t home) const noexcept {
    const std::size_t b = second(probe_key(cell), home);
    return b < count ? b : b % count;
  }
  std::size_t after(std::size_t b) const noexcept { return b + 1 == count ? 0 : b + 1; }
  // Number of buckets from `from` up to `to`, cyclically.
  std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return to >= from ? to - from : to + count - from;
  }
  // Whether bucket b precedes bucket `stands` in the probe sequence of a hash stored in `stands`.
  bool on_probe_sequence(std::uint64_t cell, std::size_t stands, std::size_t b) const noexcept {
    const std::size_t first = home(cell);
    if (stands == first) {
      return false;
    }
    const std::size_t other = second_of(cell, first);
    return b == first || distance(other, b) < distance(other, stands);
  }

  std::size_t cells() const noexcept { return count * layout->cells; }
  std::byte* bucket(std::size_t b) const noexcept {
    return const_cast<std::byte*>(memory.data()) + b * kCacheLine;
  }
  std::byte* payload(std::size_t b, std::size_t c) const noexcept {
    return bucket(b) + layout->cells * sizeof(std::uint64_t) + c * layout->payload_bytes;
  }
  // As stored: the bits of a last cell that say passed are zeros; 0 if empty.
  std::uint64_t cell(std::size_t b, std::size_t c) const noexcept {
    return load<std::uint64_t>(bucket(b) + c * sizeof(std::uint64_t));
  }
  std::uint64_t last_cell(std::size_t b) const noexcept { return cell(b, layout->cells - 1); }
  void set_passed(std::size_t b, std::uint64_t bits) noexcept {  // of a full bucket
    store(bucket(b) + (layout->cells - 1) * sizeof bits, last_cell(b) & ~bits);
  }
  bool full(std::size_t b) const noexcept { return last_cell(b) != 0; }
  std::size_t filled(std::size_t b) const noexcept {  // cells in use
    std::size_t n = 0;
    for (std::size_t c = 0; c < layout->cells; ++c) {  // no early exit: the number is unpredictable
      n += cell(b, c) != 0 ? 1U : 0U;
    }
    return n;
  }
  void copy_payload(std::byte* to, const std::byte* from) const noexcept {
    with_payload_bytes(*layout, [&]<std::size_t kBytes>(std::integral_constant<std::size_t, kBytes>) {
      store(to, load<std::array<std::byte, kBytes>>(from));  // one or two instructions
    });
  }

  const Layout* layout;
  Region memory{};
  std::size_t count = 0;       // buckets
  std::uint64_t scramble = 0;  // 0: not scrambled
};

}  // namespace shoal
