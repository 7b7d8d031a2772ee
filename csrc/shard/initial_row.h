// InitialRow: the row of a key that has none yet. It depends on the key alone, or, if the initializer and the
// dtype give every key the same, not even on that.
//
// Threads: immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shard/rows.h"
#include "shard/table_spec.h"

namespace shoal {

class InitialRow {
 public:
  // Both must outlive this object.
  InitialRow(const TableSpec& spec, const Rows& rows);

  void fill(std::uint64_t hash, std::byte* row) const noexcept;
  // The row to be read: the same of all keys, or written to `room`.
  std::byte* at(std::uint64_t hash, std::byte* room) const noexcept {
    if (!same_.empty()) {
      return same_.data();
    }
    fill(hash, room);
    return room;
  }

 private:
  const TableSpec& spec_;
  const Rows& rows_;
  mutable std::vector<std::byte> same_;  // of all keys; else empty. Read only
};

}  // namespace shoal
