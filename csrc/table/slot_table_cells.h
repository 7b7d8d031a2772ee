// Access to a SlotTable's cells: the home bucket of a hash, and the contents of a bucket. The last part of
// slot_table.h, inline because every loop over buckets uses it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "table/slot_table.h"

namespace shoal {

namespace cells {

template <class T>
inline T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
inline void keep(std::byte* at, T value) noexcept {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace cells

inline std::size_t SlotTable::home(std::uint64_t cell) const noexcept {
  return scale(probe_key(cell) << layout_->slots.bits(), buckets_);
}

inline std::size_t SlotTable::second_of(std::uint64_t cell, std::size_t home) const noexcept {
  const std::size_t b = second(probe_key(cell), home);
  return b < buckets_ ? b : b % buckets_;
}

inline std::byte* SlotTable::bucket(std::size_t b) const noexcept {
  return const_cast<std::byte*>(index_.data()) + b * kCacheLine;
}

inline std::byte* SlotTable::payload(std::size_t b, std::size_t c) const noexcept {
  return bucket(b) + layout_->cells * sizeof(std::uint64_t) + c * layout_->payload_bytes;
}

inline std::uint64_t SlotTable::cell(std::size_t b, std::size_t c) const noexcept {
  return cells::load<std::uint64_t>(bucket(b) + c * sizeof(std::uint64_t));
}

inline void SlotTable::copy_payload(std::byte* to, const std::byte* from) const noexcept {
  switch (layout_->payload_bytes) {  // a copy of a known size is one or two instructions
    case 4:
      return cells::keep(to, cells::load<std::array<std::byte, 4>>(from));
    case 8:
      return cells::keep(to, cells::load<std::array<std::byte, 8>>(from));
    case 12:
      return cells::keep(to, cells::load<std::array<std::byte, 12>>(from));
    default:
      return cells::keep(to, cells::load<std::array<std::byte, 16>>(from));
  }
}

inline std::size_t SlotTable::filled(std::size_t b) const noexcept {
  std::size_t n = 0;
  for (std::size_t c = 0; c < layout_->cells; ++c) {  // no early exit: the number is unpredictable
    n += cell(b, c) != 0 ? 1U : 0U;
  }
  return n;
}

inline bool SlotTable::full(std::size_t b) const noexcept { return cell(b, layout_->cells - 1) != 0; }

inline std::byte* SlotTable::row_at(std::byte* payload) const noexcept {
  return layout_->narrow ? payload : slab_.row(cells::load<std::uint32_t>(payload));
}

}  // namespace shoal
