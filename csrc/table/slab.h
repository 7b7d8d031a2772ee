// Slab: the wide rows of one slot, by number; and Chunks, a slab allocator (Bonwick, USENIX 1994) shared by
// the slabs of a table. The slots share huge pages: a slab is a list of chunks of about kChunkBytes, which
// are cut from blocks of 2 MiB. It costs half a chunk per slot, on average.
//
//   number    [ chunk | row in the chunk ]: a chunk has a power of two rows
//   small     a slab that fits in one chunk is a region of its own
//   free      a returned chunk serves the next slab. While more than an eighth of all chunks are free, the
//             pages of a returned chunk go back to the system at once; a block whose chunks are all free
//             always does
//
// Threads: a Slab is not synchronized, its slot's owner locks; Chunks locks its own mutex, the last in the
// lock order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "base/memory.h"
#include "base/mutex.h"

namespace shoal {

class Chunks {
 public:
  static constexpr std::size_t kChunkBytes = Region::kMapped;

  // For rows of `row_bytes`. Destroying it frees all chunks; no slab that uses it may be used afterwards.
  explicit Chunks(std::size_t row_bytes) noexcept;

  std::size_t row_bytes() const noexcept { return row_bytes_; }
  unsigned shift() const noexcept { return shift_; }
  std::size_t rows() const noexcept { return std::size_t{1} << shift_; }  // of a chunk
  std::size_t bytes() const noexcept { return bytes_; }                   // of a chunk

  // Returns a chunk with unspecified bytes. std::bad_alloc changes nothing.
  std::byte* take();
  void give(std::byte* chunk) noexcept;

 private:
  struct Block {
    HugeBlock memory;
    std::vector<std::uint16_t> free;  // numbers of the free chunks
    bool listed = true;               // in with_free_
  };
  void add_block() REQUIRES(mutex_);

  std::size_t row_bytes_;
  unsigned shift_;
  std::size_t bytes_;
  std::size_t a_block_;  // chunks
  Mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_ GUARDED_BY(mutex_);  // by address
  // Blocks that have, or had, free chunks; the last is used first.
  std::vector<Block*> with_free_ GUARDED_BY(mutex_);
  std::size_t taken_ GUARDED_BY(mutex_) = 0;
  std::size_t free_ GUARDED_BY(mutex_) = 0;
};

class Slab {
 public:
  Slab() = default;  // has no rows and never will
  explicit Slab(Chunks& chunks) noexcept : chunks_(&chunks) {}

  // Row numbers are below this.
  std::size_t rows() const noexcept { return rows_; }
  std::size_t bytes() const noexcept;
  std::size_t chunk_rows() const noexcept { return chunks_->rows(); }

  std::byte* row(std::uint32_t number) const noexcept {
    return places_[number >> chunks_->shift()] + (number & (chunks_->rows() - 1)) * chunks_->row_bytes();
  }

  // bytes() after make_room().
  std::size_t bytes_with(std::size_t rows, std::size_t likely) const noexcept;
  // Makes room for all row numbers below `rows`; existing rows keep their bytes. A small slab gets room for
  // `likely` rows if it stays small. Returns true if rows may have moved (a small slab's do). std::bad_alloc
  // loses nothing.
  bool make_room(std::size_t rows, std::size_t likely);
  // Drops the rows from number `rows` on and returns chunks that hold no other rows.
  void cut(std::size_t rows) noexcept;

  // Whether it is a region of its own. restore() gives an empty slab room for exactly `rows` rows of that
  // kind.
  bool is_small() const noexcept { return small_.bytes() != 0; }
  void restore(std::size_t rows, bool is_small);

  // Makes this slab a read-only copy of another, in memory of its own that is reused from one copy to the
  // next.
  bool has_image_room(std::size_t bytes) const noexcept { return bytes <= small_.bytes(); }
  void make_image_room(std::size_t bytes);
  void become_image_of(const Slab& of);

 private:
  Chunks* chunks_ = nullptr;
  std::vector<std::byte*> places_;  // addresses of the chunks, or of small_
  Region small_;
  std::size_t rows_ = 0;
};

}  // namespace shoal
