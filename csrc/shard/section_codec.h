// SectionCodec: the rows of a slot as columns, which is what checkpoints contain (docs/checkpoint-format.md):
// hashes in ascending order, then each column as stored, each aligned to kAlignment.
//
// Threads: immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "shard/rows.h"
#include "table/dirty_ranges.h"
#include "table/slot_table.h"

namespace shoal {

class SectionCodec {
 public:
  static constexpr std::size_t kAlignment = 64;

  // The rows must outlive this object.
  explicit SectionCodec(const Rows& rows) noexcept : rows_(rows) {}

  // Where the hashes and each column begin: rows.stored() + 2 numbers, the last of which is the size.
  std::vector<std::size_t> offsets(std::size_t rows) const;
  // Of the sections of a table with `rows` rows in total.
  std::size_t bytes(Slots slots, std::size_t rows) const;

  // Returns the number of rows. Entries ascend.
  std::size_t write(std::span<const SlotTable::Entry> entries, std::vector<std::byte>& section) const;
  // Appends their number, the hashes, and the rows as they are stored, with a padding of 0: equal rows have
  // equal bytes.
  void write_stored(std::span<const SlotTable::Entry> entries, ByteWriter& out) const;

  // Throws std::invalid_argument for a wrong size or hashes that do not ascend.
  std::vector<std::uint64_t> hashes(std::size_t rows, std::span<const std::byte> section) const;
  // Applies a delta to a base section, of any number of slots: the base's rows that lie in no range, and the
  // delta's rows, all of which must lie in one. Returns the number of rows. Throws std::invalid_argument
  // otherwise.
  std::size_t merge(std::size_t base_rows, std::span<const std::byte> base, std::size_t delta_rows,
                    std::span<const std::byte> delta, const DirtyRanges& ranges,
                    std::vector<std::byte>& merged) const;

 private:
  const Rows& rows_;
};

}  // namespace shoal
