// SlotTable: the rows of one slot, a small hash table of its own.
//
// Idea. Buckets of one cache line, in the order of the hash: a hash's home is its place, scaled to the number of
// buckets, and place never falls as the hash rises. A batch that comes in hash order walks the table front to back.
// A hash has a second bucket for when its home is full, up to kReach behind it: as a cuckoo table, but in one page.
// A hash that finds both full moves another out of them, into that one's own second bucket; where none can be moved,
// it stands in the next bucket behind its second that is not full. That is a hash's way: home, second, the buckets
// behind the second. A search follows it and stops at the first bucket that is not full.
//
//   a cell     the hash with its slot bits set to ones; 0 is an empty cell, so fresh pages are an empty table and no
//              key is reserved (all hashes of a slot share their slot bits, which thus carry nothing here)
//   growing    stretches the memory in place and then spreads the buckets from the back to the front, home by home:
//              homes only move up, and a way leads up from its home. No second copy.
//   erasing    pulls back what had passed over the freed cell: no tombstones. A table at less than half of its
//              limit is rebuilt smaller, and memory goes back to the system.
//   wide rows  stand in a slab, addressed by row number (table/slab.h); freed numbers are chained through the freed rows,
//              and the slab is compacted once a quarter of it is free.
//
// Why the limits. At a load of 0.77, 0.82 and 0.87 a hit reads 1.14, 1.17 and 1.22 lines where a line has four cells, and
// 2, 2 and 4 in a thousand more than two (simulated; going on to the next bucket at once: 1.31, 1.46 and 1.74, and 60, 82
// and 106). Growth is by 1/8, one pass over the slot, so loads lie between 0.77 and 0.87: at 16 bytes a cell, 19.5 bytes
// a key on the whole. All slots of a table fill at one pace; if they also grew at once, it would swing between 18.4 and
// 20.7 and stall in bunches. So each slot has sizes of its own: a ladder of 9/8, whose rungs are shifted by slot. Below
// 4096 rows in a slot the ladder is one of 3/2: 22.6 bytes a key, and inserting takes two thirds of the time.
//
// Invariants (verify() checks them)
//   I1  A bucket's cells are filled from the front.
//   I2  Every cell's slot bits are ones, and no hash stands twice.
//   I3  Every bucket on a hash's way before its own is full.
//   I4  size() counts the cells, and is at most limit(), which is below the number of cells.
//   I5  Wide rows: row numbers are distinct and below the end of those handed out, for which the slab has room; the freed
//       ones are all the others.
//
// Cost. A find reads one line or two, an insert one to ten; an erase from a full bucket reads kReach lines. Keys are mixed,
// so probe sequences are short, unless an adversary inverts the mix to choose keys with neighbouring hashes. An insert that
// passes kLongestProbe buckets therefore scrambles the slot: from then on its hashes are placed by a second mix with a
// secret of the process (probe_key), and probe sequences are short again. Nothing that is read or saved depends on where
// a row stands, so results stay the same; only what walks a slot in hash order has to sort first.
//
// Threads: none of its own; the owner locks (shard/shard.h).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "table/dirty_ranges.h"
#include "table/layout.h"
#include "table/slab.h"

namespace shoal {

class SlotTable {
 public:
  // How far behind its home a hash's second bucket may be: within a page, and no better beyond.
  static constexpr std::size_t kReach = 64;
  // Full buckets behind a hash's second one that an insert passes before the slot is scrambled. Among 1e8 random keys the
  // longest walk was below 256, and one in 20,000 was above 128.
  static constexpr std::size_t kLongestProbe = 256;
  struct Entry {
    std::uint64_t hash;
    const std::byte* row;
  };

  // Of wide rows, `chunks` are those that they are kept in; narrow ones need none. Both must outlive the table.
  SlotTable(const Layout& layout, Slot slot, Chunks& chunks);
  SlotTable(const Layout& layout, Slot slot);

  std::size_t size() const noexcept { return size_; }
  std::size_t limit() const noexcept { return limit_; }
  std::size_t cells() const noexcept { return buckets_ * layout_->cells; }
  // What rows and index take, whole pages and chunks of them.
  std::size_t bytes() const noexcept;

  // rows[i] becomes the row of hashes[i], or null. Rows stay where they are until version() changes or the table ends.
  void find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows);
  // The same for one, and asking for its line ahead of that: for tables that change between one hash and the next.
  std::byte* find_one(std::uint64_t hash) noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  // Changes whenever a row may have moved: by insert, reserve, erase and give_back.
  std::uint64_t version() const noexcept { return version_; }

  // For table/probe.h: the lines; the bucket that a hash's second is, counted on round the end; a payload's row. An empty
  // table has one bucket, which nobody writes.
  struct Buckets {
    std::byte* lines;
    std::size_t count;
    std::uint64_t scramble;  // for probe_key
  };
  Buckets buckets() noexcept;
  // What a hash is placed by: itself, or where its slot is scrambled (not 0) its image under a mix that nobody can invert
  // without the secret. The slot bits of the result mean nothing.
  static std::uint64_t probe_key(std::uint64_t cell, std::uint64_t scramble, unsigned slot_bits) noexcept {
    return scramble == 0 ? cell : mix((cell << slot_bits) ^ scramble) >> slot_bits;
  }
  bool is_scrambled() const noexcept { return scramble_ != 0; }
  static std::size_t second(std::uint64_t cell, std::size_t home) noexcept {
    return home + 1 + cell % kReach;  // the last bits of a hash, which its place is not made of
  }
  std::byte* row_at(std::byte* payload) const noexcept;
  const Slab& slab() const noexcept { return slab_; }

  // Room for `more` rows: up to the next rung of the slot's ladder where the index must grow. std::bad_alloc changes nothing.
  bool index_has_room(std::size_t more) const noexcept { return size_ + more <= limit_; }
  bool has_room(std::size_t more) const noexcept {
    return index_has_room(more) && (layout_->narrow || slab_end_ + more <= slab_.rows() + slab_holes_);
  }
  void make_room(std::size_t more);
  // What bytes() will be after make_room(more), or, where that takes no more than it must, after reserve(size() + more).
  std::size_t bytes_with(std::size_t more, bool exactly) const noexcept;
  // Room for `rows` in all, and no more: for callers that know the number.
  void reserve(std::size_t rows);

  // A row for a hash that is not there, its bytes unspecified. Needs has_room(1).
  std::byte* insert(std::uint64_t hash) noexcept;

  // False where there was none. Follow with give_back() once a batch is erased: memory goes back where much of it is free, or
  // `all` that can.
  bool erase(std::uint64_t hash) noexcept;
  void give_back(bool all = false);

  // All rows in ascending order of hash.
  std::vector<Entry> entries() const;

  // Becomes a copy of another table, to be read by entries() and each_row() alone: a copy of its bytes and no more, in
  // memory that is kept from one to the next. Where there is room for them it takes none, but for a list of chunks.
  struct ImageBytes {
    std::size_t index;
    std::size_t slab;
  };
  ImageBytes image_bytes() const noexcept { return {buckets_ * kCacheLine, slab_.bytes()}; }
  bool has_image_room(const ImageBytes& bytes) const noexcept;
  void make_image_room(const ImageBytes& bytes);
  void become_image_of(const SlotTable& of);

  // use(hash, row) for all rows, in no order; takes no memory. The rows may be changed, the table may not.
  template <class Use>
  void each_row(const Use& use) const {
    for (std::size_t b = 0; b < buckets_; ++b) {
      for (std::size_t c = 0; c < layout_->cells && cell(b, c) != 0; ++c) {
        use((cell(b, c) & ~in_use_) | first_hash_, row_at(payload(b, c)));
      }
    }
  }

  // use(hash, row) for the rows that lie in the ranges, in no order; takes no memory. Looks at the buckets where such rows may
  // stand and at no others, but for those that hashes whose ways lead round the end may have come to.
  template <class Use>
  void each_row_in(const DirtyRanges& ranges, const Use& use) const {
    std::size_t next = 0;  // all buckets that need it before this one were looked at
    const auto walk = [&](std::size_t first, std::size_t far) {
      std::size_t b = std::max(first, next);
      for (; b < buckets_ && (b <= far || full(b - 1)); ++b) {
        for (std::size_t c = 0; c < layout_->cells; ++c) {  // where it is empty is anybody's guess
          const std::uint64_t hash = (cell(b, c) & ~in_use_) | first_hash_;
          if (ranges.has(hash) && cell(b, c) != 0) [[unlikely]] {
            use(hash, static_cast<const std::byte*>(row_at(payload(b, c))));
          }
        }
      }
      next = std::max(next, b);
    };
    if (ranges.any()) {
      walk(0, is_scrambled() ? buckets_ : kReach - 1);
    }
    ranges.each_run([&](std::uint64_t first, std::uint64_t last) {
      walk(scale(first, buckets_), scale(last, buckets_) + kReach);
    });
  }

  // What growing cost so far: how often the index grew, how long the system took to give the memory for it, and how long
  // cells took to move; and the longest that one move took.
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
  std::uint64_t probe_key(std::uint64_t cell) const noexcept {
    return probe_key(cell, scramble_, layout_->slots.bits());
  }
  std::size_t home(std::uint64_t cell) const noexcept;
  std::size_t second_of(std::uint64_t cell, std::size_t home) const noexcept;
  std::byte* bucket(std::size_t b) const noexcept;
  std::byte* payload(std::size_t b, std::size_t c) const noexcept;
  std::byte* payload_of(std::uint64_t wanted) const noexcept;  // null where it is not there
  std::uint64_t cell(std::size_t b, std::size_t c) const noexcept;
  void copy_payload(std::byte* to, const std::byte* from) const noexcept;
  std::size_t filled(std::size_t b) const noexcept;  // cells in use
  bool full(std::size_t b) const noexcept;
  std::size_t after(std::size_t b) const noexcept { return b + 1 == buckets_ ? 0 : b + 1; }
  // How many buckets one goes up from `from` to `to`, round the end.
  std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return to >= from ? to - from : to + buckets_ - from;
  }
  bool on_probe_sequence(std::uint64_t cell, std::size_t stands, std::size_t b) const noexcept;

  // The payload for `cell`, which now has a cell. Null where its way leads round the end of the buckets and `wrap`
  // forbids that.
  std::byte* place_cell(std::uint64_t cell, bool wrap) noexcept;
  std::byte* take_cell(std::size_t b, std::size_t c, std::uint64_t cell) noexcept;
  // A cell of bucket b, which is full, that could be freed by moving its hash on to that one's second bucket; else none.
  std::size_t free_by_moving(std::size_t b, bool wrap) noexcept;
  void grow_index(std::size_t rows);
  void resize_index(std::size_t buckets);
  class DisplacedEntries;
  void spread(std::size_t old_buckets, DisplacedEntries& displaced) noexcept;
  void refill_from(const Region& index, std::size_t buckets) noexcept;
  void scramble() noexcept;
  void remove_cell(std::size_t b, std::size_t c) noexcept;
  std::pair<std::size_t, std::size_t> one_that_passed(std::size_t b) const noexcept;
  void close_gap(std::size_t b) noexcept;

  std::size_t size_class_above(std::size_t rows) const noexcept;
  std::size_t buckets_for(std::size_t rows) const noexcept;
  void set_buckets(std::size_t buckets) noexcept;
  std::size_t limit_of(std::size_t buckets) const noexcept;

  std::uint32_t take_row() noexcept;
  void free_row(std::uint32_t number) noexcept;
  void compact_slab();
  void make_slab_room(std::size_t more);

  static constexpr std::uint32_t kNoRow = ~std::uint32_t{0};

  // What a search needs stands together: a batch comes by with a few dozen hashes and finds nothing of it in the cache.
  const Layout* layout_;
  Region index_;
  std::size_t buckets_ = 0;
  std::uint64_t scramble_ = 0;  // 0: hashes are placed in their order
  std::uint64_t version_ = 0;
  std::size_t size_ = 0;
  std::size_t limit_ = 0;
  std::uint64_t in_use_;      // the slot bits, all ones
  std::uint64_t first_hash_;  // the slot bits of its hashes
  double load_limit_;
  bool probed_far_ = false;  // an insert passed kLongestProbe buckets
  double phase_;             // where the slot's ladder of sizes starts, in [0, 1) rungs
  Slab slab_;
  std::uint32_t slab_end_ = 0;        // row numbers ever handed out
  std::uint32_t slab_free_ = kNoRow;  // the chain of freed rows
  std::uint32_t slab_holes_ = 0;      // its length
  Growth growth_;
};

}  // namespace shoal

#include "table/slot_table_cells.h"
