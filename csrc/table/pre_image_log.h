// PreImageLog: a copy-on-write log: the previous contents of the parts of a slot that changed since a
// snapshot began. Entries have one size and are found by hash.
//
//   numbers   a small SlotTable: hash -> number of its entry, or kNone if the hash was absent
//   pieces    the entries, in the order of their arrival
//
// Algorithm. A slot keeps changing while it is saved as of one moment. Before a change, the writer stores the
// old contents here, once per hash. The save copies the slot later and overlays the logged contents on the
// copy. A save therefore needs memory only for what changes meanwhile, and a writer waits at most for one
// small copy.
//
// Entries are rows, counters of keys that wait for admission, and lines of a Bloom filter
// (policy/admission.h).
//
// Threads: not synchronized; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "table/slot_table.h"

namespace shoal {

class PreImageLog {
 public:
  static constexpr std::size_t kNumberBytes = sizeof(std::uint32_t);

  struct Piece {
    std::uint64_t hash;
    const std::byte* bytes;  // null: the hash was absent
  };

  // `numbers` has rows of kNumberBytes and must outlive this object.
  PreImageLog(const Layout& numbers, Slot slot, std::size_t piece_bytes)
      : numbers_(numbers, slot), piece_bytes_(piece_bytes) {}

  // The hashes that are not logged yet.
  std::vector<std::uint64_t> missing(std::span<const std::uint64_t> hashes);
  // Logs the contents of hashes that are missing(), each hash once. std::bad_alloc changes nothing.
  void log(std::span<const std::uint64_t> hashes, std::span<const std::byte* const> pieces);

  // missing() and log() of the rows of a table.
  void log_from(SlotTable& table, std::span<const std::uint64_t> hashes);

  std::size_t bytes() const noexcept { return numbers_.bytes() + pieces_.bytes(); }

  // All entries, in ascending order of hash.
  std::vector<Piece> entries() const;
  // Overlays the logged rows on `now`, the rows of a copy of the table. Both `now` and the result ascend by
  // hash.
  std::vector<SlotTable::Entry> laid_over(std::vector<SlotTable::Entry> now) const;

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  SlotTable numbers_;
  Region pieces_;
  std::size_t piece_bytes_;
  std::uint32_t end_ = 0;  // number of pieces
};

}  // namespace shoal
