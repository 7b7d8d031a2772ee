// Access to a SlotTable's cells: the home bucket of a hash, and the contents of a bucket. The last part of
// slot_table.h, inline because every loop over buckets uses it.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/prefetch.h"
#include "base/unaligned.h"
#include "table/slot_table.h"

namespace shoal {

inline std::uint64_t SlotTable::cell(std::size_t b, std::size_t c) const noexcept {
  const std::uint64_t stored = lines_.cell(b, c);
  return stored | (stored == 0 ? 0 : passed_.both);
}

inline std::byte* SlotTable::row_at(std::byte* payload) const noexcept {
  return lines_.layout->narrow ? payload : wide_.row(load<std::uint32_t>(payload));
}

// In rounds, so that the cache misses of many hashes overlap: homes that are not full, then second buckets,
// then the rest, for which other cells move. Without branches on what is full, which could not be predicted.
template <class Start>
void SlotTable::insert_missing(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows,
                               const Start& start) {
  constexpr std::size_t kRound = 64;
  for (std::size_t first = 0; first < rows.size(); first += kRound) {
    std::array<std::size_t, kRound> open;
    std::size_t open_count = 0;
    for (std::size_t i = first; i < std::min(first + kRound, rows.size()); ++i) {
      open[open_count] = i;
      open_count += rows[i] == nullptr ? 1U : 0U;
    }
    const auto insert_into = [&](const auto& bucket_of, const auto& go_on) {
      std::array<std::size_t, kRound> fits;
      std::size_t fits_count = 0;
      std::size_t rest = 0;
      for (std::size_t k = 0; k < open_count; ++k) {
        const std::size_t i = open[k];
        const bool is_full = lines_.full(bucket_of(cell_of(hashes[i])));
        fits[fits_count] = i;
        fits_count += is_full ? 0U : 1U;
        open[rest] = i;
        rest += is_full ? 1U : 0U;
      }
      for (std::size_t k = 0; k < rest; ++k) {
        go_on(cell_of(hashes[open[k]]));
      }
      for (std::size_t k = 0; k < fits_count; ++k) {
        const std::size_t i = fits[k];
        const std::uint64_t cell = cell_of(hashes[i]);
        const std::size_t b = bucket_of(cell);
        if (lines_.full(b)) [[unlikely]] {  // by now
          open[rest++] = i;
        } else {
          if (const std::size_t at_first = lines_.home(cell); b != at_first) {
            lines_.set_passed(at_first, passed_.home);
          }
          rows[i] = new_row(take_cell(b, lines_.filled(b), cell));
          ++size_;
          start(i, rows[i]);
        }
      }
      open_count = rest;
    };
    const auto first_of = [&](std::uint64_t cell) { return lines_.home(cell); };
    const auto other_of = [&](std::uint64_t cell) { return lines_.second_of(cell, lines_.home(cell)); };
    insert_into(first_of, [&](std::uint64_t cell) { shoal::prefetch(lines_.bucket(other_of(cell))); });
    insert_into(other_of, [&](std::uint64_t cell) { prefetch_seconds(lines_.home(cell)); });
    for (std::size_t k = 0; k < open_count; ++k) {
      rows[open[k]] = insert(hashes[open[k]]);
      start(open[k], rows[open[k]]);
    }
  }
}

}  // namespace shoal
