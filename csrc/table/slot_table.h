// SlotTable: the rows of one slot, in a hash table of its own: buckets of one cache line in hash order, two
// choices a few lines apart, bounded displacement, linear overflow, backward-shift erase. slot_table.cc has
// the algorithm, docs/decisions/0003 the alternatives. At a load of 0.77 to 0.87 a hit reads 1.14 to 1.22
// lines, and a row of 8 bytes takes 19.5.
//
// Invariants (verify() checks them)
//   I1  A bucket's cells are filled from the front.
//   I2  The slot bits of every cell are ones, but for those of last cells that say passed, and no hash occurs
//       twice.
//   I3  Every bucket of a hash's probe sequence before the bucket that holds the hash is full and says that
//       it is passed.
//   I4  size() is the number of cells in use and at most limit(), which is below the number of cells.
//   I5  Those of WideRows, whose numbers in use are the payloads.
//
// Threads: not synchronized; the owner locks (shard/shard.h).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "table/bucket_lines.h"
#include "table/dirty_ranges.h"
#include "table/layout.h"
#include "table/size_classes.h"
#include "table/wide_rows.h"

namespace shoal {

class SlotTable {
 public:
  // Full buckets after a hash's second one that an insert passes before the slot is scrambled. Random keys
  // stay below it: the longest sequence among 1e8 of them was shorter than 256.
  static constexpr std::size_t kLongestProbe = 256;
  struct Entry {
    std::uint64_t hash;
    const std::byte* row;
  };

  // `chunks` supplies the memory of wide rows; narrow rows need none. The layout and the chunks must outlive
  // the table.
  SlotTable(const Layout& layout, Slot slot, Chunks& chunks);
  SlotTable(const Layout& layout, Slot slot);

  std::size_t size() const noexcept { return size_; }
  std::size_t limit() const noexcept { return limit_; }
  std::size_t cells() const noexcept { return lines_.cells(); }
  // Bytes of the index and the rows, in whole pages and chunks.
  std::size_t bytes() const noexcept;

  // Sets rows[i] to the row of hashes[i], or null. The pointers are valid until version() changes or the
  // table is destroyed.
  void find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows);
  // find() of one hash, and a prefetch of its home line: for callers that change the table between two
  // hashes.
  std::byte* find_one(std::uint64_t hash) const noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  // Changes whenever a row may have moved: on insert, reserve, erase and give_back.
  std::uint64_t version() const noexcept { return version_; }

  // For table/probe.h: the index. buckets() of an empty table is one empty bucket, which is never written.
  struct Buckets {
    std::byte* lines;
    std::size_t count;
    std::uint64_t scramble;  // for BucketLines::probe_key
  };
  Buckets buckets() noexcept;
  bool is_scrambled() const noexcept { return lines_.scramble != 0; }
  std::byte* row_at(std::byte* payload) const noexcept;
  const Slab& slab() const noexcept { return wide_.slab(); }

  // Makes room for `more` rows; an index that must grow grows to the slot's next size class. std::bad_alloc
  // changes nothing.
  bool index_has_room(std::size_t more) const noexcept { return size_ + more <= limit_; }
  bool has_room(std::size_t more) const noexcept {
    return index_has_room(more) && (lines_.layout->narrow || wide_.has_room(more));
  }
  void make_room(std::size_t more);
  // bytes() after make_room(more), or with `exactly` after reserve(size() + more).
  std::size_t bytes_with(std::size_t more, bool exactly) const noexcept;
  // Makes room for exactly `rows` rows in total, for callers that know the number.
  void reserve(std::size_t rows);

  // Inserts a hash that is absent and returns its row, whose bytes are unspecified. Requires has_room(1).
  std::byte* insert(std::uint64_t hash) noexcept;
  // Inserts the hashes whose rows[i] is null and sets rows[i], as find() would if version() has not changed.
  // Calls start(i, row), which writes the row, after each insert: later ones may move it. Requires has_room()
  // for them.
  template <class Start>
  void insert_missing(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows, const Start& start);

  // Returns false if the hash is absent. Call give_back() after the erases of a batch: it returns memory to
  // the system if much of it is free, or with `shrinks_fully` as much as possible.
  bool erase(std::uint64_t hash) noexcept;
  void give_back(bool shrinks_fully = false);

  // Takes over the rows of another table of the same slot, which is empty afterwards; the present rows are
  // dropped. Rows that were found before count as moved.
  void replace_with(SlotTable& other) noexcept;
  // Drops all rows and returns their memory.
  void clear() noexcept;

  // What bytes() and later growth depend on, besides the rows.
  struct Capacity {
    std::uint64_t buckets = 0;
    std::uint64_t slab_rows = 0;
    std::uint64_t slab_end = 0;
    bool slab_is_small = false;
  };
  Capacity capacity() const noexcept { return {lines_.count, slab().rows(), wide_.end(), slab().is_small()}; }
  // Makes an empty table equal to one of `rows` rows that had this capacity: begin_restore(), the inserts in
  // ascending order of hash, finish_restore(). std::invalid_argument if no table of so many rows has it.
  void begin_restore(const Capacity& capacity, std::size_t rows);
  void finish_restore(const Capacity& capacity) noexcept;

  // All rows in ascending order of hash.
  std::vector<Entry> entries() const;

  // Makes this table a copy of another, for entries() and each_row() only. The bytes are copied as they are,
  // into memory that is reused from one copy to the next. If has_image_room(), nothing is allocated but a
  // list of chunks.
  struct ImageBytes {
    std::size_t index;
    std::size_t slab;
  };
  ImageBytes image_bytes() const noexcept { return {lines_.count * kCacheLine, slab().bytes()}; }
  bool has_image_room(const ImageBytes& bytes) const noexcept;
  void make_image_room(const ImageBytes& bytes);
  void become_image_of(const SlotTable& of);

  // Calls use(hash, row) for all rows, in unspecified order; allocates nothing. Rows may be changed, the
  // table may not.
  template <class Use>
  void each_row(const Use& use) const {
    for (std::size_t b = 0; b < lines_.count; ++b) {
      for (std::size_t c = 0; c < lines_.layout->cells && cell(b, c) != 0; ++c) {
        use((cell(b, c) & ~in_use_) | first_hash_, row_at(lines_.payload(b, c)));
      }
    }
  }

  // Calls use(hash, row) for the rows whose hashes lie in the ranges, in unspecified order; allocates
  // nothing. Visits only the buckets that may hold such rows, and the first BucketLines::kReach, which probe
  // sequences reach that wrap around the end.
  template <class Use>
  void each_row_in(const DirtyRanges& ranges, const Use& use) const {
    std::size_t next = 0;  // all buckets before this one have been visited, or need not be
    const auto walk = [&](std::size_t first, std::size_t far) {
      std::size_t b = std::max(first, next);
      for (; b < lines_.count && (b <= far || lines_.full(b - 1)); ++b) {
        for (std::size_t c = 0; c < lines_.layout->cells; ++c) {  // no branch on empty cells
          const std::uint64_t hash = (cell(b, c) & ~in_use_) | first_hash_;
          if (ranges.has(hash) && cell(b, c) != 0) [[unlikely]] {
            use(hash, static_cast<const std::byte*>(row_at(lines_.payload(b, c))));
          }
        }
      }
      next = std::max(next, b);
    };
    if (ranges.any()) {
      walk(0, is_scrambled() ? lines_.count : BucketLines::kReach - 1);
    }
    ranges.each_run([&](std::uint64_t first, std::uint64_t last) {
      walk(scale(first, lines_.count), scale(last, lines_.count) + BucketLines::kReach);
    });
  }

  // Cost of growing: the number of times the index grew, the time to obtain its memory, the time to move its
  // cells, and the longest single move.
  struct Growth {
    std::uint64_t times = 0;
    std::uint64_t memory_ns = 0;
    std::uint64_t moving_ns = 0;
    std::uint64_t longest_ns = 0;
  };
  const Growth& growth() const noexcept { return growth_; }

  // The number of the first broken invariant, 0 where all hold.
  int verify() const;

 private:
  std::uint64_t cell_of(std::uint64_t hash) const noexcept { return hash | in_use_; }
  std::byte* payload_of(std::uint64_t wanted) const noexcept;       // null if absent
  std::uint64_t cell(std::size_t b, std::size_t c) const noexcept;  // its slot bits are ones; 0 if empty
  // Whether the probe sequence of a hash whose home (or another bucket) is b may go on after b.
  bool is_passed(std::size_t b, bool at_home) const noexcept {
    return PassedBits::says(lines_.last_cell(b), at_home ? passed_.home : passed_.later);
  }

  // Stores `cell` and returns its payload.
  std::byte* place_cell(std::uint64_t cell) noexcept;
  std::byte* take_cell(std::size_t b, std::size_t c, std::uint64_t cell) noexcept;
  // Frees a cell of the full bucket b by moving its hash to that hash's second bucket, and returns the cell's
  // number; lines_.layout->cells if no hash can be moved.
  std::size_t free_by_moving(std::size_t b) noexcept;
  // Prefetches the lines that free_by_moving(b) reads.
  void prefetch_seconds(std::size_t b) const noexcept;
  // The row of a payload that was just taken.
  std::byte* new_row(std::byte* payload) noexcept;
  void grow_index(std::size_t rows);
  void resize_index(std::size_t buckets);
  template <std::size_t kPayload>
  class WaitingCells;
  template <std::size_t kPayload>
  void spread(std::size_t old_buckets, WaitingCells<kPayload>& waiting) noexcept;
  void refill_from(const Region& index, std::size_t buckets) noexcept;
  void scramble() noexcept;
  void remove_cell(std::size_t b, std::size_t c) noexcept;
  std::pair<std::size_t, std::size_t> find_passed(std::size_t b) const noexcept;
  void close_gap(std::size_t b, std::uint64_t last) noexcept;  // `last` is the last cell that b had

  std::size_t buckets_for(std::size_t rows) const noexcept {
    return classes_.buckets_for(rows, lines_.layout->cells);
  }
  void set_buckets(std::size_t buckets) noexcept;
  void compact_wide_rows();

  // The members that a search needs come first, in one cache line: a batch brings a few dozen hashes to a
  // slot whose members are not cached.
  BucketLines lines_;
  std::uint64_t version_ = 0;
  std::size_t size_ = 0;
  std::size_t limit_ = 0;
  std::uint64_t in_use_;  // the slot bits, all ones
  PassedBits passed_;
  std::uint64_t first_hash_;  // the slot bits of its hashes
  SizeClasses classes_;
  bool probed_far_ = false;  // an insert passed kLongestProbe buckets
  WideRows wide_;
  Growth growth_;
};

}  // namespace shoal

#include "table/slot_table_cells.h"
