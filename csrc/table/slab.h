// Slab: the wide rows of one slot, by number; and Chunks, which the slabs of a table are cut from.
//
// Idea. A slot is a thousandth of a table, so its rows seldom fill pages of 2 MiB, and with pages of 4 KiB half the time of
// a push goes into finding pages. So the slots of a table share pages: a slab is a list of chunks of about kChunkBytes, and
// chunks stand in blocks of 2 MiB. (Rows of 128 bytes, 64 of each of 1024 slots, read and written in a region of 640 MB,
// fetched ahead: 54 ns a row with pages of 4 KiB, 28 with pages of 2 MiB; and fresh pages come at five times the rate.)
//
//   number    [ chunk | row in the chunk ]: rows of a chunk are a power of two
//   small     a slab that one chunk would hold is a region of its own on the heap
//   freed     a chunk that is given back serves the next slab. While more than an eighth of all are free its pages go back
//             to the system at once; a block whose chunks are all free always does
//
// What it costs: half a chunk a slot, on average.
//
// Threads: a Slab has none of its own, its slot's owner locks; Chunks has a mutex, which is the last to be locked.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/memory.h"

namespace shoal {

class Chunks {
 public:
  static constexpr std::size_t kChunkBytes = Region::kMapped;

  // Of rows of `row_bytes`. Slabs that use it must not be used after its end; it ends with all its chunks.
  explicit Chunks(std::size_t row_bytes) noexcept;

  std::size_t row_bytes() const noexcept { return row_bytes_; }
  unsigned shift() const noexcept { return shift_; }
  std::size_t rows() const noexcept { return std::size_t{1} << shift_; }  // of a chunk
  std::size_t bytes() const noexcept { return bytes_; }                   // of a chunk

  // A chunk, its bytes unspecified. std::bad_alloc changes nothing.
  std::byte* take();
  void give(std::byte* chunk) noexcept;

 private:
  struct Block {
    HugeBlock memory;
    std::vector<std::uint16_t> free;  // its chunks, by number
    bool listed = true;               // in with_free_
  };
  void add_block();

  std::size_t row_bytes_;
  unsigned shift_;
  std::size_t bytes_;
  std::size_t a_block_;                     // chunks
  std::mutex mutex_;                        // guards all below
  std::map<std::uintptr_t, Block> blocks_;  // by address
  std::vector<Block*> with_free_;           // those that have, or had, free chunks: the last is asked first
  std::size_t taken_ = 0;
  std::size_t free_ = 0;
};

class Slab {
 public:
  Slab() = default;  // of no rows, now and later
  explicit Slab(Chunks& chunks) noexcept : chunks_(&chunks) {}

  // Numbers below this have rows.
  std::size_t rows() const noexcept { return rows_; }
  std::size_t bytes() const noexcept;

  std::byte* row(std::uint32_t number) const noexcept {
    return places_[number >> chunks_->shift()] + (number & (chunks_->rows() - 1)) * chunks_->row_bytes();
  }

  // What bytes() will be after make_room.
  std::size_t bytes_with(std::size_t rows, std::size_t likely) const noexcept;
  // Room for rows of all numbers below `rows`, which keep their bytes; where that is a small slab, for `likely` ones if that
  // still is one. Whether rows may have moved: a small slab's do. std::bad_alloc loses nothing.
  bool make_room(std::size_t rows, std::size_t likely);
  // Rows from number `rows` on are forgotten, and chunks without others given back.
  void cut(std::size_t rows) noexcept;

  // A copy of another slab, to be read alone: in memory of its own, which it keeps from one to the next.
  bool has_image_room(std::size_t bytes) const noexcept { return bytes <= small_.bytes(); }
  void make_image_room(std::size_t bytes);
  void become_image_of(const Slab& of);

 private:
  Chunks* chunks_ = nullptr;
  std::vector<std::byte*> places_;  // of the chunks; of small_ where there is none
  Region small_;
  std::size_t rows_ = 0;
};

}  // namespace shoal
