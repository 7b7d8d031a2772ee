#include "table/dirty_ranges.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <string>

#include "base/check.h"

namespace shoal {

namespace {

// Doubles every bit of x: bit i becomes bits 2 i and 2 i + 1.
std::uint64_t doubled(std::uint64_t x) noexcept {
  x &= 0xffffffffU;
  x = (x | x << 16U) & 0x0000ffff0000ffffU;
  x = (x | x << 8U) & 0x00ff00ff00ff00ffU;
  x = (x | x << 4U) & 0x0f0f0f0f0f0f0f0fU;
  x = (x | x << 2U) & 0x3333333333333333U;
  x = (x | x << 1U) & 0x5555555555555555U;
  return x | x << 1U;
}

std::size_t word_bytes(unsigned bits) noexcept { return (std::size_t{1} << bits) / 8; }

bool is_list(unsigned bits, std::size_t count) noexcept {
  return count < word_bytes(bits) / sizeof(std::uint32_t);
}

}  // namespace

DirtyRanges::DirtyRanges(Slots slots, unsigned bits, std::size_t count, std::span<const std::byte> saved)
    : slot_bits_(slots.bits()), bits_(bits) {
  // The count is checked before it is multiplied, and no allocation exceeds what the length of `saved`
  // justifies.
  SHOAL_CHECK(bits >= kMinBits && bits <= kMaxBits && bits + slots.bits() <= 64 &&
                  count <= std::size_t{1} << bits && saved.size() == saved_bytes(bits, count),
              std::to_string(saved.size()) + " bytes do not name " + std::to_string(count) + " ranges of " +
                  std::to_string(bits) + " bits");
  words_.resize(word_bytes(bits) / sizeof(std::uint64_t));
  if (is_list(bits, count)) {
    std::vector<std::uint32_t> ranges(count);
    std::ranges::copy(saved, reinterpret_cast<std::byte*>(ranges.data()));
    SHOAL_CHECK(std::ranges::adjacent_find(ranges, std::greater_equal<>()) == ranges.end() &&
                    (ranges.empty() || ranges.back() >> (bits - 1) <= 1),
                "the ranges of a slot must ascend, and be of " + std::to_string(bits) + " bits");
    for (const std::uint32_t range : ranges) {
      words_[range / 64] |= std::uint64_t{1} << (range % 64);
    }
  } else {
    std::memcpy(words_.data(), saved.data(), saved.size());
    SHOAL_CHECK(this->count() == count, "the ranges of a slot are not " + std::to_string(count));
  }
}

bool DirtyRanges::any() const noexcept {
  return std::ranges::any_of(words_, [](std::uint64_t word) { return word != 0; });
}

std::size_t DirtyRanges::count() const noexcept {
  std::size_t count = 0;
  for (const std::uint64_t word : words_) {
    count += static_cast<std::size_t>(std::popcount(word));
  }
  return count;
}

std::size_t DirtyRanges::find(bool named, std::size_t from) const noexcept {
  for (std::size_t w = from / 64; w < words_.size(); ++w) {
    std::uint64_t word = named ? words_[w] : ~words_[w];
    word &= w == from / 64 ? ~std::uint64_t{0} << (from % 64) : ~std::uint64_t{0};
    if (word != 0) {
      return w * 64 + static_cast<std::size_t>(std::countr_zero(word));
    }
  }
  return words_.size() * 64;
}

bool DirtyRanges::halve() noexcept {
  try {
    std::vector<std::uint64_t> halves(2 * words_.size());
    for (std::size_t i = 0; i < words_.size(); ++i) {
      halves[2 * i] = doubled(words_[i]);
      halves[2 * i + 1] = doubled(words_[i] >> 32U);
    }
    words_.swap(halves);
    ++bits_;
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void DirtyRanges::add(std::span<const std::uint64_t> hashes, std::size_t rows) noexcept {
  while (2 * rows > 3 * (std::size_t{1} << bits_) && bits_ < kMaxBits && halve()) {
  }
  for (const std::uint64_t hash : hashes) {
    const std::size_t range = range_of(hash);
    words_[range / 64] |= std::uint64_t{1} << (range % 64);
  }
}

void DirtyRanges::add(const DirtyRanges& other) noexcept {
  while (bits_ < other.bits_ && halve()) {
  }
  // One of these ranges covers 2^finer of the other's, or one of the other's covers 2^coarser of these.
  const unsigned finer = other.bits_ > bits_ ? other.bits_ - bits_ : 0;
  const unsigned coarser = bits_ > other.bits_ ? bits_ - other.bits_ : 0;
  for (std::size_t w = 0; w < other.words_.size(); ++w) {
    for (std::uint64_t word = other.words_[w]; word != 0; word &= word - 1) {
      const std::size_t range = w * 64 + static_cast<std::size_t>(std::countr_zero(word));
      const std::size_t first = (range >> finer) << coarser;
      for (std::size_t r = first; r < first + (std::size_t{1} << coarser); ++r) {
        words_[r / 64] |= std::uint64_t{1} << (r % 64);
      }
    }
  }
}

std::size_t DirtyRanges::saved_bytes(unsigned bits, std::size_t count) noexcept {
  return is_list(bits, count) ? count * sizeof(std::uint32_t) : word_bytes(bits);
}

void DirtyRanges::save(std::vector<std::byte>& bytes) const {
  const std::size_t n = count();
  const std::size_t at = bytes.size();
  bytes.resize(at + saved_bytes(bits_, n));
  if (!is_list(bits_, n)) {
    std::memcpy(bytes.data() + at, words_.data(), bytes.size() - at);
    return;
  }
  std::byte* to = bytes.data() + at;
  for (std::size_t w = 0; w < words_.size(); ++w) {
    for (std::uint64_t word = words_[w]; word != 0; word &= word - 1, to += sizeof(std::uint32_t)) {
      const auto range =
          static_cast<std::uint32_t>(w * 64 + static_cast<std::size_t>(std::countr_zero(word)));
      std::memcpy(to, &range, sizeof range);
    }
  }
}

}  // namespace shoal
