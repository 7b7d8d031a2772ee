// Erasing from a SlotTable by backward shift, and shrinking.

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
  std::size_t b = lines_.home(wanted);
  for (bool at_home = true;; at_home = false) {
    for (std::size_t c = 0; c < lines_.layout->cells; ++c) {
      if (cell(b, c) == wanted) {
        if (!lines_.layout->narrow) {
          wide_.free(load<std::uint32_t>(lines_.payload(b, c)));
        }
        const std::uint64_t last = lines_.last_cell(b);
        remove_cell(b, c);
        close_gap(b, last);
        --size_;
        return true;
      }
    }
    if (!is_passed(b, at_home)) {
      return false;
    }
    b = at_home ? lines_.second_of(wanted, b) : lines_.after(b);
  }
}

void SlotTable::remove_cell(std::size_t b, std::size_t c) noexcept {
  ++version_;
  const std::size_t last = lines_.filled(b) - 1;
  store(lines_.bucket(b) + c * sizeof(std::uint64_t), cell(b, last));
  lines_.copy_payload(lines_.payload(b, c), lines_.payload(b, last));
  store(lines_.bucket(b) + last * sizeof(std::uint64_t), std::uint64_t{0});
}

// Finds a hash whose probe sequence crosses bucket b, and returns its bucket and cell; {b, 0} if there is
// none. A hash in its second bucket is at most BucketLines::kReach after b; a hash that overflowed lies after
// a run of full buckets.
std::pair<std::size_t, std::size_t> SlotTable::find_passed(std::size_t b) const noexcept {
  bool goes_on = true;
  std::size_t j = b;
  for (std::size_t far = 1; far < lines_.count && (far <= BucketLines::kReach || goes_on); ++far) {
    j = lines_.after(j);
    goes_on = lines_.full(j);
    const std::size_t n = lines_.filled(j);
    for (std::size_t c = 0; c < n; ++c) {
      if (lines_.on_probe_sequence(cell(j, c), j, b)) {
        return {j, c};
      }
    }
  }
  return {b, 0};
}

// Bucket b lost a cell: moves a hash that had passed it back into the gap (I3), then closes the gap that this
// hash leaves.
void SlotTable::close_gap(std::size_t b, std::uint64_t last) noexcept {
  while (PassedBits::says(last, passed_.home) || PassedBits::says(last, passed_.later)) {
    const auto [j, c] = find_passed(b);
    if (j == b) {
      return;
    }
    const std::uint64_t next_last = lines_.last_cell(j);
    lines_.copy_payload(take_cell(b, lines_.filled(b), cell(j, c)), lines_.payload(j, c));
    lines_.set_passed(b, passed_.both & ~last);  // others may have passed as well
    remove_cell(j, c);
    last = next_last;
    b = j;
  }
}

void SlotTable::give_back(bool shrinks_fully) {
  if (size_ == 0) {
    lines_.memory = Region();
    wide_.cut(0);
    set_buckets(0);
    lines_.scramble = 0;
    return;
  }
  if (wide_.holes() != 0 && (shrinks_fully || std::size_t{wide_.holes()} * 4 > wide_.end())) {
    compact_wide_rows();
  }
  if (shrinks_fully || size_ < limit_ / 2) {
    const std::size_t buckets = buckets_for(classes_.rows_above(size_));
    if (buckets < lines_.count) {
      if (!lines_.layout->narrow) {
        compact_wide_rows();
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
  SHOAL_DCHECK(first_hash_ == other.first_hash_ && lines_.layout == other.lines_.layout);
  clear();
  std::swap(lines_.memory, other.lines_.memory);
  std::swap(wide_, other.wide_);
  std::swap(size_, other.size_);
  std::swap(limit_, other.limit_);
  std::swap(lines_.count, other.lines_.count);
  std::swap(lines_.scramble, other.lines_.scramble);
  version_ = std::max(version_, other.version_) + 1;  // never a value that an address was recorded with
}

void SlotTable::compact_wide_rows() {
  wide_.compact(static_cast<std::uint32_t>(size_), lines_.layout->row_bytes, [&](const auto& use) {
    for (std::size_t b = 0; b < lines_.count; ++b) {
      const std::size_t n = lines_.filled(b);
      for (std::size_t c = 0; c < n; ++c) {
        use(lines_.payload(b, c));
      }
    }
  });
  ++version_;
}

}  // namespace shoal
