// UseCounters: which hashes of a slot were used again while their rows were in memory (counters as in
// TinyLFU: Einziger, Friedman, Manes, ACM ToS 2017, with one row of counters).
//
//   counter   4 bits, that stop at 15; the hash without its slot bits, scaled to their number, chooses one: a
//             batch in hash order goes through them front to back
//   add       a pull that finds a row in memory adds 2, a change 1, and what brings or creates a row nothing:
//             a row that a step has pulled and pushed once has 1, and 4 after the next one. Nothing is added
//             while memory is far from its limit
//   limit     kManyUses: rows with as many are kept. Rows that are seldom used share counters: with eight
//             counters for a row, few of them reach it together
//
// Threads: not synchronized.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mix.h"

namespace shoal {

class UseCounters {
 public:
  static constexpr std::size_t kPerRow = 8;
  static constexpr unsigned kMost = 15;
  static constexpr unsigned kManyUses = 3;

  UseCounters(unsigned slot_bits, std::size_t rows)
      : slot_bits_(slot_bits), pairs_(std::max<std::size_t>(8, rows * kPerRow / 2)) {}

  std::size_t bytes() const noexcept { return pairs_.capacity(); }

  unsigned of(std::uint64_t hash) const noexcept {
    const std::size_t at = place_of(hash);
    return (unsigned{pairs_[at / 2]} >> (at % 2 * 4U)) & kMost;
  }
  void add(std::uint64_t hash, unsigned uses) noexcept {
    const std::size_t at = place_of(hash);
    const unsigned shift = at % 2 * 4U;
    const unsigned now = (unsigned{pairs_[at / 2]} >> shift) & kMost;
    pairs_[at / 2] =
        static_cast<std::uint8_t>(pairs_[at / 2] + ((std::min(kMost, now + uses) - now) << shift));
  }
  void halve() noexcept {
    for (std::uint8_t& pair : pairs_) {
      pair = static_cast<std::uint8_t>((pair >> 1U) & 0x77U);
    }
  }

 private:
  std::size_t place_of(std::uint64_t hash) const noexcept {
    return scale(hash << slot_bits_, 2 * pairs_.size());
  }

  unsigned slot_bits_;
  std::vector<std::uint8_t> pairs_;
};

}  // namespace shoal
