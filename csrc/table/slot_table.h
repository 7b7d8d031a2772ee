// SlotTable: the rows of one slot, a small hash table of its own.
//
// Idea. Buckets of one cache line, in the order of the hash: a hash's home is its place, scaled to the number of
// buckets, and place never falls as the hash rises. A batch that comes in hash order walks the table front to back.
// A hash whose home is full stands in the next bucket that is not, and a search stops at the first such bucket.
//
//   a cell     the hash with its slot bits set to ones; 0 is an empty cell, so fresh pages are an empty table and no
//              key is reserved (all hashes of a slot share their slot bits, which thus carry nothing here)
//   growing    stretches the memory in place and then spreads the buckets from the back to the front, cluster by
//              cluster (a cluster is a run of full buckets and the next one): homes only move up. No second copy.
//   erasing    pulls back what had passed over the freed cell: no tombstones. A table at less than half of its
//              limit is rebuilt smaller, and memory goes back to the system.
//   wide rows  stand in a slab, addressed by row number; freed numbers are chained through the freed rows, and the slab
//              is compacted once a quarter of it is free.
//
// Why the limits. At a load of 0.75, 0.80, 0.86 and 0.90 a hit reads 1.27, 1.39, 1.65 and 1.96 lines where a line has
// four cells (simulated; measured in bench/). Growth is by 1/8, one pass over the slot, so loads lie between 0.77 and
// 0.87: 1.5 lines and, at 16 bytes a cell, 19.5 bytes a key on the whole. All slots of a table fill at one pace; if they
// also grew at once, it would swing between 18.4 and 20.7 and stall in bunches. So each slot has sizes of its own: a
// ladder of 9/8, whose rungs are shifted by slot.
//
// Invariants (verify() checks them)
//   I1  A bucket's cells are filled from the front.
//   I2  Every cell's slot bits are ones, and no hash stands twice.
//   I3  Every bucket from a hash's home to the one before its own is full.
//   I4  size() counts the cells, and is at most limit(), which is below the number of cells.
//   I5  Wide rows: row numbers are distinct and below the slab's end; the freed ones are all the others.
//
// Cost. find, insert and erase walk a cluster. Keys are mixed, so clusters are short unless somebody inverts the mix to
// choose keys with neighbouring hashes: then each costs a walk over its kin, and nothing else goes wrong.
//
// Threads: none of its own; the owner locks (store/shard.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "table/layout.h"

namespace shoal {

class SlotTable {
 public:
  // How far ahead of its use a line is fetched, in keys.
  static constexpr std::size_t kAhead = 16;
  // How many hashes are looked for at a time: find takes more, in rounds of this many.
  static constexpr std::size_t kRound = 128;

  struct Entry {
    std::uint64_t hash;
    const std::byte* row;
  };

  SlotTable(const Layout& layout, Slot slot);

  std::size_t size() const noexcept { return size_; }
  std::size_t limit() const noexcept { return limit_; }
  std::size_t cells() const noexcept { return buckets_ * layout_->cells; }
  // What rows and index take, whole pages of them; the slab's pages that nobody wrote are not there.
  std::size_t bytes() const noexcept;

  // Fetches the lines that a find of the first kAhead hashes starts at.
  void prefetch(std::span<const std::uint64_t> hashes) const noexcept;

  // rows[i] becomes the row of hashes[i], or null, for as many as rows has; the hashes beyond it are those that will be
  // asked for next. Rows stay where they are until reserve, erase or the end of the table.
  void find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) const noexcept;

  // Room for `more` rows: up to the next rung of the slot's ladder where it must grow. std::bad_alloc changes nothing.
  bool has_room(std::size_t more) const noexcept { return size_ + more <= limit_; }
  void make_room(std::size_t more);
  // Room for `rows` in all, and no more: for callers that know the number.
  void reserve(std::size_t rows);

  // A row for a hash that is not there, its bytes unspecified. Needs has_room(1).
  std::byte* insert(std::uint64_t hash) noexcept;

  // False where there was none. Follow with give_back() once a batch is erased.
  bool erase(std::uint64_t hash) noexcept;
  void give_back();

  // All rows in ascending order of hash.
  std::vector<Entry> entries() const;

  // The number of the first broken invariant, 0 where all hold.
  int verify() const;

 private:
  std::uint64_t cell_of(std::uint64_t hash) const noexcept { return hash | in_use_; }
  std::size_t home(std::uint64_t cell) const noexcept;
  std::byte* bucket(std::size_t b) const noexcept;
  std::byte* payload(std::size_t b, std::size_t c) const noexcept;
  std::uint64_t cell(std::size_t b, std::size_t c) const noexcept;
  std::size_t filled(std::size_t b) const noexcept;  // cells in use
  bool full(std::size_t b) const noexcept;
  std::size_t after(std::size_t b) const noexcept { return b + 1 == buckets_ ? 0 : b + 1; }
  std::byte* row_at(std::byte* payload) const noexcept;

  // A free payload for `cell`, which now has a cell. False where the walk from its home meets the end of the buckets
  // and `wrap` forbids to go on at the first.
  std::byte* place_cell(std::uint64_t cell, bool wrap) noexcept;
  void resize_index(std::size_t buckets);
  void spread(std::size_t old_buckets, Region& lifted) noexcept;
  void remove_cell(std::size_t b, std::size_t c) noexcept;
  void close_gap(std::size_t b) noexcept;

  std::size_t rung_above(std::size_t rows) const noexcept;
  std::size_t buckets_for(std::size_t rows) const noexcept;
  void set_buckets(std::size_t buckets) noexcept;

  std::byte* slab_row(std::uint32_t number) const noexcept;
  std::uint32_t take_row() noexcept;
  void free_row(std::uint32_t number) noexcept;
  void compact_slab();

  static constexpr std::uint32_t kNoRow = ~std::uint32_t{0};

  const Layout* layout_;
  std::uint64_t first_hash_;  // the slot bits of its hashes
  std::uint64_t in_use_;      // the slot bits, all ones
  double load_limit_;
  double phase_;  // where the slot's ladder of sizes starts, in [0, 1) rungs
  std::size_t buckets_ = 0;
  std::size_t size_ = 0;
  std::size_t limit_ = 0;
  Region index_;
  Region slab_;
  std::uint32_t slab_end_ = 0;        // row numbers ever handed out
  std::uint32_t slab_free_ = kNoRow;  // the chain of freed rows
  std::uint32_t slab_holes_ = 0;      // its length
};

}  // namespace shoal
