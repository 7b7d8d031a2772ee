// WideRows: the wide rows of one slot by number, in a slab, with a chain of free numbers through the free
// rows.
//
// Invariants (SlotTable's verify() checks them)
//   I1  The numbers in use are distinct and below end(); all other numbers below end() are in the chain.
//   I2  The slab has room for end() rows.
//
// Threads: not synchronized; the slot's owner locks.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/unaligned.h"
#include "table/slab.h"

namespace shoal {

class WideRows {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  WideRows() = default;  // has no rows and never will
  explicit WideRows(Chunks& chunks) noexcept : slab_(chunks) {}

  const Slab& slab() const noexcept { return slab_; }
  std::uint32_t end() const noexcept { return end_; }
  std::uint32_t holes() const noexcept { return holes_; }  // the length of the chain
  std::byte* row(std::uint32_t number) const noexcept { return slab_.row(number); }

  std::uint32_t take() noexcept {
    if (free_ == kNone) {
      return end_++;
    }
    --holes_;
    return std::exchange(free_, load<std::uint32_t>(slab_.row(free_)));
  }
  void free(std::uint32_t number) noexcept {
    store(slab_.row(number), free_);
    free_ = number;
    ++holes_;
  }

  bool has_room(std::size_t more) const noexcept { return end_ + more <= slab_.rows() + holes_; }
  // Of a slot whose index has room for `limit` rows. Returns true if rows may have moved.
  bool make_room(std::size_t more, std::size_t limit) {
    return more > holes_ && slab_.make_room(end_ + more - holes_, likely_rows(more, limit));
  }
  // slab().bytes() after make_room().
  std::size_t bytes_with(std::size_t more, std::size_t limit) const noexcept {
    return more <= holes_ ? slab_.bytes() : slab_.bytes_with(end_ + more - holes_, likely_rows(more, limit));
  }

  // Moves the rows with numbers from `live` on, which is how many are in use, to free numbers below, and
  // returns memory. each(use) calls use(payload) for all payloads that hold a number.
  template <class Each>
  void compact(std::uint32_t live, std::size_t row_bytes, const Each& each) {
    std::vector<std::uint32_t> free;
    free.reserve(holes_);
    each_free([&](std::uint32_t number) {
      if (number < live) {
        free.push_back(number);
      }
      return true;
    });
    each([&](std::byte* payload) {
      if (const auto number = load<std::uint32_t>(payload); number >= live) {
        std::memcpy(slab_.row(free.back()), slab_.row(number), row_bytes);
        store(payload, free.back());
        free.pop_back();
      }
    });
    cut(live);
  }
  // Drops the rows from number `live` on; all others are in use.
  void cut(std::uint32_t live) noexcept {
    end_ = live;
    free_ = kNone;
    holes_ = 0;
    slab_.cut(live);
  }
  // Calls use(number) along the chain until it returns false.
  template <class Use>
  void each_free(const Use& use) const {
    for (std::uint32_t number = free_; number != kNone && use(number);
         number = load<std::uint32_t>(slab_.row(number))) {
    }
  }

  // An empty object gets room for `rows` rows; then, with the rows in use taken, the numbers up to `end` are
  // made free.
  void begin_restore(std::size_t rows, bool is_small) { slab_.restore(rows, is_small); }
  void finish_restore(std::uint32_t end) noexcept {
    const std::uint32_t live = std::exchange(end_, end);
    for (std::uint32_t number = end; number-- > live;) {
      free(number);
    }
  }

  // Slab: copies.
  void make_image_room(std::size_t bytes) { slab_.make_image_room(bytes); }
  void become_image_of(const WideRows& of) { slab_.become_image_of(of.slab_); }

 private:
  std::size_t likely_rows(std::size_t more, std::size_t limit) const noexcept {
    return std::max(end_ + more - holes_, holes_ + limit);
  }

  Slab slab_;
  std::uint32_t end_ = 0;       // row numbers below this are in use or free
  std::uint32_t free_ = kNone;  // first of the chain of free rows
  std::uint32_t holes_ = 0;
};

}  // namespace shoal
