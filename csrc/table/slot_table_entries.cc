// Rows of a SlotTable in hash order (a windowed counting sort), copies of a table, and the check of its
// invariants.

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "table/slot_table.h"
#include "table/slot_table_cells.h"

namespace shoal {

std::size_t SlotTable::bytes() const noexcept { return lines_.memory.bytes() + slab().bytes(); }

namespace {

// Insertion sort, limited to `moves` moves: with chosen keys that share a position it would be quadratic. At
// the limit the rest is sorted by std::ranges::sort.
void sort_nearly_sorted(std::span<SlotTable::Entry> rows, std::size_t& moves) {
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i - 1].hash < rows[i].hash) [[likely]] {
      continue;
    }
    const SlotTable::Entry row = rows[i];
    std::size_t j = i;
    for (; j > 0 && rows[j - 1].hash > row.hash && moves != 0; --j, --moves) {
      rows[j] = rows[j - 1];
    }
    rows[j] = row;
    if (moves == 0) {
      std::ranges::sort(rows, {}, &SlotTable::Entry::hash);
      return;
    }
  }
}

}  // namespace

// A counting sort by position: the hash scaled to kFine positions per bucket, so that few hashes share one;
// an insertion sort then orders those that do. It runs window by window, so that counters, buckets and rows
// stay in the
// L1 cache: a row is usually stored in the window of its home or in the next one. The other rows (wrapped
// around the end, or after many colliding hashes) are merged in last. Empty cells are unpredictable, so there
// is no branch on them: they have a counter and an output row of their own.
std::vector<SlotTable::Entry> SlotTable::entries() const {
  if (is_scrambled()) {
    std::vector<Entry> ordered;
    ordered.reserve(size_);
    each_row([&](std::uint64_t hash, const std::byte* row) { ordered.push_back({hash, row}); });
    std::ranges::sort(ordered, {}, &Entry::hash);
    return ordered;
  }
  constexpr std::size_t kFine = 8;                           // positions per bucket
  constexpr std::size_t kBuckets = 2 * BucketLines::kReach;  // of a window
  constexpr std::size_t kWindow = kBuckets * kFine;
  constexpr std::size_t kRing = 4 * kWindow;  // three windows of it are in use at a time
  constexpr std::size_t kMaxCells = kCacheLine / sizeof(std::uint64_t);
  const std::size_t places = lines_.count * kFine;
  const std::size_t cells = lines_.layout->cells;
  const unsigned slot_bits = lines_.layout->slots.bits();
  const auto entry = [this, cells, lines = lines_.memory.data(), wide = !lines_.layout->narrow,
                      hash_bits = ~in_use_, slot = first_hash_, payload_bytes = lines_.layout->payload_bytes](
                         std::size_t b, std::size_t c, bool there) -> Entry {
    const std::byte* const line = lines + b * kCacheLine;
    const std::byte* row = line + cells * sizeof(std::uint64_t) + c * payload_bytes;
    if (wide) {  // the payload of an empty cell is not a row number
      row = there ? wide_.row(load<std::uint32_t>(row)) : nullptr;
    }
    return {(load<std::uint64_t>(line + c * sizeof(std::uint64_t)) & hash_bits) | slot, row};
  };
  std::vector<Entry> ordered(size_ + 1);  // the last one for empty cells
  std::vector<Entry> strays;
  std::array<std::uint32_t, kRing + 1> next;  // rows per position; then the index of the next row of each
  std::array<std::array<std::uint16_t, kBuckets * kMaxCells>, 2> at_cells;  // by cell, of two windows
  next[kRing] = 0;

  const auto ring_of = [&](std::size_t window) {
    return std::span(next).subspan(window * kWindow % kRing, kWindow);
  };
  const auto buckets_of = [&](std::size_t window) {
    return std::pair(window * kBuckets, std::min(lines_.count, (window + 1) * kBuckets));
  };
  const auto count = [&](std::size_t window) {
    std::ranges::fill(ring_of(window), 0U);
    std::uint16_t* position = at_cells[window % 2].data();
    const auto [first, last] = buckets_of(window);
    std::uint64_t any = 0;
    for (std::size_t b = first; b < last; ++b) {
      for (std::size_t c = 0; c < cells; ++c) {
        const std::uint64_t stored = lines_.cell(b, c);
        const std::size_t place = scale(stored << slot_bits, places);
        const std::uint64_t strayed = window - place / kWindow > 1;  // true below 0 as well
        const std::uint64_t there = stored >> 63U;                   // a slot bit, never cleared
        any |= strayed & there;
        const std::uint64_t mask = ~strayed & there;  // no branch
        const std::size_t at = kRing + mask * (place % kRing - kRing);
        *position++ = static_cast<std::uint16_t>(at);
        ++next[at];
      }
    }
    position = at_cells[window % 2].data();
    for (std::size_t b = first; b < last && any != 0; ++b) {
      for (std::size_t c = 0; c < cells; ++c, ++position) {
        if (*position == kRing && lines_.cell(b, c) != 0) {
          strays.push_back(entry(b, c, true));
        }
      }
    }
  };
  const auto pour = [&](std::size_t window) {
    const std::uint16_t* position = at_cells[window % 2].data();
    const auto [first, last] = buckets_of(window);
    next[kRing] = static_cast<std::uint32_t>(size_);
    for (std::size_t b = first; b < last; ++b) {
      for (std::size_t c = 0; c < cells; ++c) {
        const std::size_t at = *position++;
        const std::uint32_t row = next[at];
        ordered[row] = entry(b, c, at != kRing);
        next[at] = row + static_cast<std::uint32_t>(at != kRing);
      }
    }
  };

  const std::size_t windows = (lines_.count + kBuckets - 1) / kBuckets;
  std::size_t moves = 4 * size_;
  std::size_t done = 0;   // rows in order
  std::size_t begin = 0;  // index of the first row of a window
  if (windows != 0) {
    count(0);
  }
  for (std::size_t window = 0; window < windows; ++window) {
    if (window + 1 < windows) {
      count(window + 1);
    }
    std::size_t end = begin;
    for (std::uint32_t& place : ring_of(window)) {
      end += std::exchange(place, static_cast<std::uint32_t>(end));
    }
    pour(window);
    sort_nearly_sorted(std::span(ordered).subspan(done, begin - done),
                       moves);  // of the previous window, which is now complete
    done = begin;
    begin = end;
  }
  sort_nearly_sorted(std::span(ordered).subspan(done, begin - done), moves);
  ordered.pop_back();
  std::ranges::sort(strays, {}, &Entry::hash);
  std::ranges::copy(strays, ordered.begin() + static_cast<std::ptrdiff_t>(begin));
  std::ranges::inplace_merge(ordered, ordered.begin() + static_cast<std::ptrdiff_t>(begin), {}, &Entry::hash);
  return ordered;
}

void SlotTable::begin_restore(const Capacity& capacity, std::size_t rows) {
  constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 36U;  // of one slot: more than any machine gives it
  const std::uint64_t chunk_rows = lines_.layout->narrow ? 1 : slab().chunk_rows();
  const bool has_sound_index =
      capacity.buckets <= kMaxBytes / kCacheLine &&
      Region::rounded(capacity.buckets * kCacheLine) == capacity.buckets * kCacheLine &&
      rows <= classes_.limit_of(capacity.buckets, lines_.layout->cells);
  const bool has_sound_slab =
      lines_.layout->narrow
          ? capacity.slab_rows == 0 && capacity.slab_end == 0 && !capacity.slab_is_small
          : capacity.slab_end >= rows && capacity.slab_end <= capacity.slab_rows &&
                capacity.slab_rows < WideRows::kNone &&
                capacity.slab_rows <= kMaxBytes / lines_.layout->row_bytes &&
                (capacity.slab_is_small ? capacity.slab_rows != 0 && capacity.slab_rows <= chunk_rows
                                        : capacity.slab_rows % chunk_rows == 0);
  SHOAL_CHECK(lines_.count == 0 && has_sound_index && has_sound_slab,
              "no table of " + std::to_string(rows) + " rows has " + std::to_string(capacity.buckets) +
                  " buckets and room for " + std::to_string(capacity.slab_rows) + " wide rows");
  lines_.memory.resize(capacity.buckets * kCacheLine);
  if (capacity.buckets <= 4 * buckets_for(rows)) {
    lines_.memory.populate(0);
  }
  set_buckets(capacity.buckets);
  if (!lines_.layout->narrow) {
    wide_.begin_restore(capacity.slab_rows, capacity.slab_is_small);
  }
}

void SlotTable::finish_restore(const Capacity& capacity) noexcept {
  wide_.finish_restore(static_cast<std::uint32_t>(capacity.slab_end));
}

bool SlotTable::has_image_room(const ImageBytes& bytes) const noexcept {
  return bytes.index <= lines_.memory.bytes() && slab().has_image_room(bytes.slab);
}

void SlotTable::make_image_room(const ImageBytes& bytes) {
  if (bytes.index > lines_.memory.bytes()) {
    lines_.memory = Region();  // the old contents are not needed
    lines_.memory.resize(Region::rounded(bytes.index + bytes.index / 4));
    lines_.memory.populate(0);
  }
  wide_.make_image_room(bytes.slab);
}

void SlotTable::become_image_of(const SlotTable& of) {
  make_image_room(of.image_bytes());
  if (of.lines_.count != 0) {
    std::memcpy(lines_.memory.data(), of.lines_.memory.data(), of.lines_.count * kCacheLine);
  }
  wide_.become_image_of(of.wide_);
  lines_.layout = of.lines_.layout;
  lines_.count = of.lines_.count;
  size_ = of.size_;
  limit_ = of.limit_;
  in_use_ = of.in_use_;
  passed_ = of.passed_;
  first_hash_ = of.first_hash_;
  lines_.scramble = of.lines_.scramble;
}

int SlotTable::verify() const {
  std::size_t count = 0;
  std::vector<std::uint64_t> cells_seen;
  std::vector<std::uint8_t> numbers(wide_.end(), 0);
  for (std::size_t b = 0; b < lines_.count; ++b) {
    const std::size_t n = lines_.filled(b);
    for (std::size_t c = n; c < lines_.layout->cells; ++c) {
      if (cell(b, c) != 0) {
        return 1;
      }
    }
    for (std::size_t c = 0; c < n; ++c, ++count) {
      const std::uint64_t stored = cell(b, c);
      cells_seen.push_back(stored);
      if ((stored & in_use_) != in_use_ || (c + 1 != lines_.layout->cells && stored != lines_.cell(b, c))) {
        return 2;
      }
      std::size_t way = lines_.home(stored);
      for (bool at_home = true; way != b; at_home = false) {
        if (!is_passed(way, at_home)) {
          return 3;
        }
        way = at_home ? lines_.second_of(stored, way) : lines_.after(way);
      }
      if (!lines_.layout->narrow) {
        const auto number = load<std::uint32_t>(lines_.payload(b, c));
        if (number >= wide_.end() || numbers[number]++ != 0) {
          return 5;
        }
      }
    }
  }
  std::sort(cells_seen.begin(), cells_seen.end());
  if (std::adjacent_find(cells_seen.begin(), cells_seen.end()) != cells_seen.end()) {
    return 2;
  }
  if (count != size_ || size_ > limit_ || (lines_.count > 0 && limit_ >= cells())) {
    return 4;
  }
  std::size_t holes = 0;
  bool is_sound = true;
  wide_.each_free([&](std::uint32_t number) {
    is_sound = number < wide_.end() && numbers[number]++ == 0;
    holes += 1;
    return is_sound;
  });
  is_sound &= holes == wide_.holes() && holes + size_ == wide_.end() && wide_.end() <= slab().rows();
  return lines_.layout->narrow || is_sound ? 0 : 5;
}

}  // namespace shoal
