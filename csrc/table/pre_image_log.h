// PreImageLog: what stood in a slot before it changed, as far as it changed: pieces of one size, by hash.
//
//   numbers   a small SlotTable: hash -> number of its piece, or kNone where there was nothing then
//   pieces    one behind the other, as they came
//
// Idea. A slot that is to be saved as it was at some moment goes on changing. Whoever changes a piece keeps the old one
// here first, once; the save copies the slot whenever it comes by and lays what was kept over the copy. So a save costs
// memory for what changes meanwhile and for nothing else, and no writer waits for more than a small copy.
//
// Rows are such pieces, and so are the places of waiting keys and the lines of a Bloom filter (policy/admission.h).
//
// Threads: none of its own; the slot's owner locks.

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
    const std::byte* bytes;  // null: there was nothing
  };

  // The layout is of kNumberBytes, and outlives this.
  PreImageLog(const Layout& numbers, Slot slot, std::size_t piece_bytes)
      : numbers_(numbers, slot), piece_bytes_(piece_bytes) {}

  // Those of the hashes of which nothing was kept yet.
  std::vector<std::uint64_t> missing(std::span<const std::uint64_t> hashes);
  // Keeps pieces of hashes that are missing(); each hash once. std::bad_alloc changes nothing.
  void keep(std::span<const std::uint64_t> hashes, std::span<const std::byte* const> partition);

  // Both, of the rows of a table.
  void keep_from(SlotTable& table, std::span<const std::uint64_t> hashes);

  std::size_t bytes() const noexcept { return numbers_.bytes() + pieces_.bytes(); }

  // All of them, in ascending order of hash.
  std::vector<Piece> entries() const;
  // Rows as they were: `now` is what a copy of the table has, in ascending order of hash, as is what is returned.
  std::vector<SlotTable::Entry> laid_over(std::vector<SlotTable::Entry> now) const;

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  SlotTable numbers_;
  Region pieces_;
  std::size_t piece_bytes_;
  std::uint32_t end_ = 0;  // pieces that there are
};

}  // namespace shoal
