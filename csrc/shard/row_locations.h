// RowLocations: where the rows of one batch stand in one shard, from the walk that last read them.
//
// Idea. A search reads a line of the index, and for wide rows only then knows which lines the row is. Whoever walks the same
// batch again, as a push does behind its pull, goes to the rows straight away, and whoever sorts a batch ahead can
// have its rows found ahead. Rows move only when a slot's table changes its version, and come without that (table/slot_table.h):
// a slot whose version has changed, or where rows were missing and some have come, is searched anew, the others are not.
//
//   rows[i]       the row of hash i, null where there was none
//   versions[s]   1 + the version of slot s when rows[offsets[s]], ... were noted; 0: they were not
//   sizes[s]      the rows that it had then, if one of these was missing; else kAny
//
// Threads: as many write as walk the batch's parts, for each slot one; else one thread, or handed on.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "table/slot_table.h"

namespace shoal {

class RowLocations {
 public:
  // Of a batch's hashes, which must outlive it and stay as they are.
  explicit RowLocations(std::span<const std::uint64_t> hashes) noexcept : hashes_(hashes) {}

  bool is_of(std::span<const std::uint64_t> hashes) const noexcept {
    return hashes.data() == hashes_.data() && hashes.size() == hashes_.size();
  }

  // What is known is forgotten unless it is of this shard.
  void reset_for(std::uint64_t shard, std::size_t slots) {
    if (shard_ != shard) {
      rows_.resize(hashes_.size());
      versions_.assign(slots, 0);
      sizes_.assign(slots, kAny);
      shard_ = shard;
    }
  }

  bool is_for(std::uint64_t shard) const noexcept { return shard_ == shard; }

  bool knows(std::size_t slot, const SlotTable& table) const noexcept {
    return versions_[slot] == table.version() + 1 && (sizes_[slot] == kAny || sizes_[slot] == table.size());
  }
  std::span<std::byte* const> rows(std::size_t first, std::size_t count) const noexcept {
    return std::span(rows_).subspan(first, count);
  }
  void note(std::size_t slot, const SlotTable& table, std::size_t first,
            std::span<std::byte* const> rows) noexcept {
    if (versions_[slot] != table.version() + 1) {
      versions_[slot] = table.version() + 1;
      sizes_[slot] = kAny;
    }
    if (std::find(rows.begin(), rows.end(), nullptr) != rows.end()) {
      sizes_[slot] = table.size();
    }
    std::copy(rows.begin(), rows.end(), rows_.begin() + static_cast<std::ptrdiff_t>(first));
  }

 private:
  static constexpr std::size_t kAny = ~std::size_t{0};

  std::span<const std::uint64_t> hashes_;
  std::uint64_t shard_ = 0;  // shards are numbered from 1
  std::vector<std::byte*> rows_;
  std::vector<std::uint64_t> versions_;
  std::vector<std::size_t> sizes_;
};

}  // namespace shoal
