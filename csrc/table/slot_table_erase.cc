// Erasing from a SlotTable by backward shift, shrinking, and the row numbers of wide rows.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "table/slot_table.h"
#include "table/slot_table_cells.h"

namespace shoal {

bool SlotTable::erase(std::uint64_t hash) noexcept {
  if (size_ == 0) {
    return false;
  }
  const std::uint64_t wanted = cell_of(hash);
  std::size_t b = home(wanted);
  for (bool at_home = true;; at_home = false) {
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      if (cell(b, c) == wanted) {
        if (!layout_->narrow) {
          free_row(load<std::uint32_t>(payload(b, c)));
        }
        const std::uint64_t last = last_cell(b);
        remove_cell(b, c);
        close_gap(b, last);
        --size_;
        return true;
      }
    }
    if (!is_passed(b, at_home)) {
      return false;
    }
    b = at_home ? second_of(wanted, b) : after(b);
  }
}

void SlotTable::remove_cell(std::size_t b, std::size_t c) noexcept {
  ++version_;
  const std::size_t last = filled(b) - 1;
  store(bucket(b) + c * sizeof(std::uint64_t), cell(b, last));
  copy_payload(payload(b, c), payload(b, last));
  store(bucket(b) + last * sizeof(std::uint64_t), std::uint64_t{0});
}

// Whether bucket b precedes bucket `stands` in the probe sequence of a hash stored in `stands`.
bool SlotTable::on_probe_sequence(std::uint64_t cell, std::size_t stands, std::size_t b) const noexcept {
  const std::size_t first = home(cell);
  if (stands == first) {
    return false;
  }
  const std::size_t other = second_of(cell, first);
  return b == first || distance(other, b) < distance(other, stands);
}

// Finds a hash whose probe sequence crosses bucket b, and returns its bucket and cell; {b, 0} if there is none. A
// hash in its second bucket is at most kReach after b; a hash that overflowed lies after a run of full buckets.
std::pair<std::size_t, std::size_t> SlotTable::one_that_passed(std::size_t b) const noexcept {
  bool goes_on = true;
  std::size_t j = b;
  for (std::size_t far = 1; far < buckets_ && (far <= kReach || goes_on); ++far) {
    j = after(j);
    goes_on = full(j);
    const std::size_t n = filled(j);
    for (std::size_t c = 0; c < n; ++c) {
      if (on_probe_sequence(cell(j, c), j, b)) {
        return {j, c};
      }
    }
  }
  return {b, 0};
}

// Bucket b lost a cell: moves a hash that had passed it back into the gap (I3), then closes the gap that this hash
// leaves.
void SlotTable::close_gap(std::size_t b, std::uint64_t last) noexcept {
  while (Passed::says(last, passed_.home) || Passed::says(last, passed_.later)) {
    const auto [j, c] = one_that_passed(b);
    if (j == b) {
      return;
    }
    const std::uint64_t its_last = last_cell(j);
    copy_payload(take_cell(b, filled(b), cell(j, c)), payload(j, c));
    set_passed(b, passed_.both & ~last);  // others may have passed as well
    remove_cell(j, c);
    last = its_last;
    b = j;
  }
}

void SlotTable::give_back(bool all) {
  if (size_ == 0) {
    index_ = Region();
    slab_.cut(0);
    set_buckets(0);
    scramble_ = 0;
    slab_end_ = 0;
    slab_free_ = kNoRow;
    slab_holes_ = 0;
    return;
  }
  if (slab_holes_ != 0 && (all || std::size_t{slab_holes_} * 4 > slab_end_)) {
    compact_slab();
  }
  if (all || size_ < limit_ / 2) {
    const std::size_t buckets = buckets_for(size_class_above(size_));
    if (buckets < buckets_) {
      if (!layout_->narrow) {
        compact_slab();
      }
      resize_index(buckets);
    }
  }
}

void SlotTable::clear() noexcept {
  size_ = 0;
  give_back();
}

void SlotTable::replace_with(SlotTable& other) noexcept {
  SHOAL_DCHECK(first_hash_ == other.first_hash_ && layout_ == other.layout_);
  clear();
  std::swap(index_, other.index_);
  std::swap(slab_, other.slab_);
  std::swap(size_, other.size_);
  std::swap(limit_, other.limit_);
  std::swap(buckets_, other.buckets_);
  std::swap(scramble_, other.scramble_);
  std::swap(slab_end_, other.slab_end_);
  std::swap(slab_free_, other.slab_free_);
  std::swap(slab_holes_, other.slab_holes_);
  version_ = std::max(version_, other.version_) + 1;  // never a value that an address was recorded with
}

// --- the slab ---------------------------------------------------------------------------------------------------

std::uint32_t SlotTable::take_row() noexcept {
  if (slab_free_ == kNoRow) {
    return slab_end_++;
  }
  const std::uint32_t number = slab_free_;
  slab_free_ = load<std::uint32_t>(slab_.row(number));
  --slab_holes_;
  return number;
}

void SlotTable::free_row(std::uint32_t number) noexcept {
  store(slab_.row(number), slab_free_);
  slab_free_ = number;
  ++slab_holes_;
}

// Moves rows with numbers at or above the number of live rows into the free numbers below it.
void SlotTable::compact_slab() {
  const auto live = static_cast<std::uint32_t>(size_);
  std::vector<std::uint32_t> holes;
  holes.reserve(slab_holes_);
  for (std::uint32_t hole = slab_free_; hole != kNoRow; hole = load<std::uint32_t>(slab_.row(hole))) {
    if (hole < live) {
      holes.push_back(hole);
    }
  }
  for (std::size_t b = 0; b < buckets_; ++b) {
    const std::size_t n = filled(b);
    for (std::size_t c = 0; c < n; ++c) {
      const auto number = load<std::uint32_t>(payload(b, c));
      if (number >= live) {
        std::memcpy(slab_.row(holes.back()), slab_.row(number), layout_->row_bytes);
        store(payload(b, c), holes.back());
        holes.pop_back();
      }
    }
  }
  ++version_;
  slab_end_ = live;
  slab_free_ = kNoRow;
  slab_holes_ = 0;
  slab_.cut(slab_end_);
}

void SlotTable::make_slab_room(std::size_t more) {
  if (!layout_->narrow && more > slab_holes_) {
    const std::size_t rows = slab_end_ + more - slab_holes_;
    if (slab_.make_room(rows, std::max(rows, slab_holes_ + limit_))) {
      ++version_;
    }
  }
}

}  // namespace shoal
