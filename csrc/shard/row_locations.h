// RowLocations: the addresses of a batch's rows in one shard, as found by the last pass over it (a lookup
// cache validated by version numbers).
//
// A search reads a line of the index, and only then knows the lines of a wide row. A second pass over the
// same batch, such as a push after its pull, goes to the rows directly, and a caller that prepares batches
// ahead of time can find their rows early. Rows move only when a slot's table changes its version
// (table/slot_table.h); rows can appear without that. Slots whose version has changed, or that had missing
// rows and have grown, are searched again; the others are not.
//
//   rows[i]       the row of hash i, null if absent
//   versions[s]   1 + the version of slot s when rows[offsets[s]], ... were recorded; 0: not recorded
//   sizes[s]      the number of rows of the slot at that time if one of these was missing; else kAny
//
// Threads: during a pass, one thread per slot writes; otherwise one thread at a time.

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
  // `hashes` must outlive this object and stay unchanged.
  explicit RowLocations(std::span<const std::uint64_t> hashes) noexcept : hashes_(hashes) {}

  bool is_of(std::span<const std::uint64_t> hashes) const noexcept {
    return hashes.data() == hashes_.data() && hashes.size() == hashes_.size();
  }

  // Clears the contents unless they belong to this shard.
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
