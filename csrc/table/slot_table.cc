#include "table/slot_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace shoal {

namespace {

constexpr double kSpread = 0.10;  // between the slots that grow first and those that grow last

// The highest load of a bucket width: where a hit still reads about 1.5 lines.
double highest_load(std::size_t cells) noexcept {
  switch (cells) {
    case 2:
      return 0.84;
    case 3:
      return 0.90;
    default:
      return 0.94;
  }
}

template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void keep(std::byte* at, T value) noexcept {
  std::memcpy(at, &value, sizeof value);
}

void fetch(const std::byte* line) noexcept { __builtin_prefetch(line, 1); }

}  // namespace

SlotTable::SlotTable(const Layout& layout, Slot slot)
    : layout_(&layout),
      first_hash_(layout.slots.first_hash(slot)),
      in_use_(~(~std::uint64_t{0} >> layout.slots.bits())),
      // The golden ratio's multiples spread any run of slot numbers evenly.
      load_limit_(highest_load(layout.cells) - kSpread * static_cast<double>(index_of(slot) * 0x9e3779b9U) * 0x1p-32) {}

// --- where things stand -----------------------------------------------------------------------------------------

std::size_t SlotTable::home(std::uint64_t cell) const noexcept {
  return scale(cell << layout_->slots.bits(), buckets_);
}

std::byte* SlotTable::bucket(std::size_t b) const noexcept {
  return const_cast<std::byte*>(index_.data()) + b * kCacheLine;
}

std::byte* SlotTable::payload(std::size_t b, std::size_t c) const noexcept {
  return bucket(b) + layout_->cells * sizeof(std::uint64_t) + c * layout_->payload_bytes;
}

std::uint64_t SlotTable::cell(std::size_t b, std::size_t c) const noexcept {
  return load<std::uint64_t>(bucket(b) + c * sizeof(std::uint64_t));
}

std::size_t SlotTable::filled(std::size_t b) const noexcept {
  std::size_t n = 0;
  while (n < layout_->cells && cell(b, n) != 0) {
    ++n;
  }
  return n;
}

bool SlotTable::full(std::size_t b) const noexcept { return cell(b, layout_->cells - 1) != 0; }

std::byte* SlotTable::slab_row(std::uint32_t number) const noexcept {
  return const_cast<std::byte*>(slab_.data()) + std::size_t{number} * layout_->row_bytes;
}

std::byte* SlotTable::row_at(std::byte* payload) const noexcept {
  return layout_->narrow ? payload : slab_row(load<std::uint32_t>(payload));
}

// --- finding ----------------------------------------------------------------------------------------------------

void SlotTable::prefetch(std::span<const std::uint64_t> hashes) const noexcept {
  if (buckets_ == 0) {
    return;
  }
  for (const std::uint64_t hash : hashes.first(std::min(hashes.size(), kAhead))) {
    fetch(bucket(home(hash)));
  }
}

template <std::size_t kCells, std::size_t kPayload>
void SlotTable::find_in(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) const noexcept {
  std::byte* const buckets = bucket(0);
  const unsigned shift = layout_->slots.bits();
  const std::size_t count = buckets_;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint64_t ahead = hashes[std::min(i + kAhead, hashes.size() - 1)];
    fetch(buckets + scale(ahead << shift, count) * kCacheLine);
    const std::uint64_t wanted = cell_of(hashes[i]);
    std::size_t b = scale(wanted << shift, count);
    for (;;) {
      std::byte* const line = buckets + b * kCacheLine;
      unsigned match = 0;
      for (std::size_t c = 0; c < kCells; ++c) {  // no branch: which cell it is cannot be predicted
        match |= static_cast<unsigned>(load<std::uint64_t>(line + c * sizeof wanted) == wanted) << c;
      }
      if (match != 0) [[likely]] {
        rows[i] = line + kCells * sizeof wanted + static_cast<std::size_t>(std::countr_zero(match)) * kPayload;
        break;
      }
      if (load<std::uint64_t>(line + (kCells - 1) * sizeof wanted) == 0) {
        rows[i] = nullptr;
        break;
      }
      b = after(b);
    }
  }
}

void SlotTable::find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) const noexcept {
  if (size_ == 0) {
    std::fill(rows.begin(), rows.end(), nullptr);
    return;
  }
  switch (layout_->payload_bytes) {
    case 4:
      find_in<5, 4>(hashes, rows);
      break;
    case 8:
      find_in<4, 8>(hashes, rows);
      break;
    case 12:
      find_in<3, 12>(hashes, rows);
      break;
    default:
      find_in<2, 16>(hashes, rows);
      break;
  }
  if (layout_->narrow) {
    return;
  }
  constexpr std::size_t kFetched = 8 * kCacheLine;  // beyond it the machine's own prefetcher has seen the pattern
  const std::size_t fetched = std::min(layout_->row_bytes, kFetched);
  for (auto& row : rows) {
    if (row != nullptr) {
      row = row_at(row);
      for (std::size_t at = 0; at < fetched; at += kCacheLine) {
        fetch(row + at);
      }
      fetch(row + fetched - 1);
    }
  }
}

// --- inserting and growing --------------------------------------------------------------------------------------

std::byte* SlotTable::place_cell(std::uint64_t cell, bool wrap) noexcept {
  std::size_t b = home(cell);
  while (full(b)) {
    if (b + 1 == buckets_ && !wrap) {
      return nullptr;
    }
    b = after(b);
  }
  const std::size_t c = filled(b);
  keep(bucket(b) + c * sizeof cell, cell);
  return payload(b, c);
}

std::byte* SlotTable::insert(std::uint64_t hash) noexcept {
  SHOAL_DCHECK(has_room(1));
  std::byte* const at = place_cell(cell_of(hash), true);
  ++size_;
  if (layout_->narrow) {
    return at;
  }
  const std::uint32_t number = take_row();
  keep(at, number);
  return slab_row(number);
}

std::size_t SlotTable::buckets_for(std::size_t rows) const noexcept {
  const auto cells = static_cast<std::size_t>(static_cast<double>(rows + 1) / load_limit_) + 1;
  return Region::rounded((cells + layout_->cells - 1) / layout_->cells * kCacheLine) / kCacheLine;
}

void SlotTable::set_buckets(std::size_t buckets) noexcept {
  buckets_ = buckets;
  limit_ = buckets == 0 ? 0
                        : std::min(cells() - 1, static_cast<std::size_t>(static_cast<double>(cells()) * load_limit_));
}

void SlotTable::make_room(std::size_t more) {
  if (!has_room(more)) {
    reserve(std::max(size_ + more, size_ + size_ / 8));
  }
}

void SlotTable::reserve(std::size_t rows) {
  if (rows <= limit_) {
    return;
  }
  SHOAL_CHECK(rows < kNoRow, "one slot of the store would hold 2^32 rows: choose more slots");
  const std::size_t buckets = buckets_for(rows);
  if (!layout_->narrow) {
    // Rows of the slab that nobody wrote take no memory, so it may be as long as the index could ever fill.
    slab_.resize(buckets * layout_->cells * layout_->row_bytes);
  }
  resize_index(buckets);
}

void SlotTable::resize_index(std::size_t buckets) {
  if (buckets > buckets_) {
    const std::size_t old_buckets = buckets_;
    Region lifted(old_buckets * kCacheLine);  // before the first change; only what is written takes memory
    index_.resize(buckets * kCacheLine);
    set_buckets(buckets);
    spread(old_buckets, lifted);
    return;
  }
  Region old(buckets * kCacheLine);
  std::swap(old, index_);
  const std::size_t old_buckets = buckets_;
  set_buckets(buckets);
  const std::size_t cell_bytes = layout_->cells * sizeof(std::uint64_t);
  for (std::size_t b = 0; b < old_buckets; ++b) {
    const std::byte* const line = old.data() + b * kCacheLine;
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      const auto kept = load<std::uint64_t>(line + c * sizeof(std::uint64_t));
      if (kept == 0) {
        break;
      }
      std::memcpy(place_cell(kept, true), line + cell_bytes + c * layout_->payload_bytes, layout_->payload_bytes);
    }
  }
}

// Moves the first `old_buckets` buckets' cells to their homes among all. From the back to the front by clusters: a
// cluster's cells have their old homes in it, so their new homes are in it or behind it, where all is done already.
void SlotTable::spread(std::size_t old_buckets, Region& lifted) noexcept {
  const std::size_t stride = sizeof(std::uint64_t) + layout_->payload_bytes;
  std::size_t held = 0;   // lifted cells that wait for the end: those which may have passed the last bucket
  std::size_t count = 0;  // lifted cells
  const auto lift = [&](std::size_t b) {
    const std::size_t n = filled(b);
    for (std::size_t c = 0; c < n; ++c, ++count) {
      std::byte* const at = lifted.data() + count * stride;
      keep(at, cell(b, c));
      std::memcpy(at + sizeof(std::uint64_t), payload(b, c), layout_->payload_bytes);
    }
    std::memset(bucket(b), 0, kCacheLine);
  };
  const auto put = [&](std::size_t i, bool wrap) {
    const std::byte* const from = lifted.data() + i * stride;
    std::byte* const to = place_cell(load<std::uint64_t>(from), wrap);
    if (to != nullptr) {
      std::memcpy(to, from + sizeof(std::uint64_t), layout_->payload_bytes);
    }
    return to != nullptr;
  };

  std::size_t first = 0;
  if (old_buckets > 0 && full(old_buckets - 1)) {
    for (bool more = true; more && first < old_buckets; ++first) {
      more = full(first);
      lift(first);
    }
    held = count;
  }
  for (std::size_t end = old_buckets; end > first;) {
    std::size_t begin = end - 1;
    while (begin > first && full(begin - 1)) {
      --begin;
    }
    for (std::size_t b = begin; b < end; ++b) {
      lift(b);
    }
    for (std::size_t i = held; i < count; ++i) {
      if (!put(i, false)) {
        std::memmove(lifted.data() + held * stride, lifted.data() + i * stride, stride);  // held <= i: already put
        ++held;
      }
    }
    count = held;
    end = begin;
  }
  for (std::size_t i = 0; i < held; ++i) {
    put(i, true);
  }
}

// --- erasing ----------------------------------------------------------------------------------------------------

bool SlotTable::erase(std::uint64_t hash) noexcept {
  if (size_ == 0) {
    return false;
  }
  const std::uint64_t wanted = cell_of(hash);
  for (std::size_t b = home(wanted);; b = after(b)) {
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      if (cell(b, c) == wanted) {
        if (!layout_->narrow) {
          free_row(load<std::uint32_t>(payload(b, c)));
        }
        const bool was_full = full(b);
        remove_cell(b, c);
        if (was_full) {
          close_gap(b);
        }
        --size_;
        return true;
      }
    }
    if (!full(b)) {
      return false;
    }
  }
}

void SlotTable::remove_cell(std::size_t b, std::size_t c) noexcept {
  const std::size_t last = filled(b) - 1;
  keep(bucket(b) + c * sizeof(std::uint64_t), cell(b, last));
  std::memmove(payload(b, c), payload(b, last), layout_->payload_bytes);
  keep(bucket(b) + last * sizeof(std::uint64_t), std::uint64_t{0});
}

// Bucket b was full and lost a cell: one that had passed over it, if there is any, must come back (I3).
void SlotTable::close_gap(std::size_t b) noexcept {
  const auto distance = [this](std::size_t from, std::size_t to) { return to >= from ? to - from : to + buckets_ - from; };
  for (std::size_t j = after(b); j != b; j = after(j)) {
    const bool was_full = full(j);
    const std::size_t n = filled(j);
    for (std::size_t c = 0; c < n; ++c) {
      if (distance(home(cell(j, c)), j) >= distance(b, j)) {
        const std::size_t to = filled(b);
        keep(bucket(b) + to * sizeof(std::uint64_t), cell(j, c));
        std::memcpy(payload(b, to), payload(j, c), layout_->payload_bytes);
        remove_cell(j, c);
        b = j;  // the gap is here now
        break;
      }
    }
    if (!was_full) {
      return;
    }
  }
}

void SlotTable::give_back() {
  if (size_ == 0) {
    index_ = Region();
    slab_ = Region();
    set_buckets(0);
    slab_end_ = 0;
    slab_free_ = kNoRow;
    slab_holes_ = 0;
    return;
  }
  if (std::size_t{slab_holes_} * 4 > slab_end_) {
    compact_slab();
  }
  if (size_ < limit_ / 2) {
    const std::size_t buckets = buckets_for(size_ + size_ / 8);
    if (buckets < buckets_) {
      if (!layout_->narrow) {
        compact_slab();
      }
      resize_index(buckets);
      if (!layout_->narrow) {
        slab_.resize(buckets * layout_->cells * layout_->row_bytes);
      }
    }
  }
}

// --- the slab ---------------------------------------------------------------------------------------------------

std::uint32_t SlotTable::take_row() noexcept {
  if (slab_free_ == kNoRow) {
    return slab_end_++;
  }
  const std::uint32_t number = slab_free_;
  slab_free_ = load<std::uint32_t>(slab_row(number));
  --slab_holes_;
  return number;
}

void SlotTable::free_row(std::uint32_t number) noexcept {
  keep(slab_row(number), slab_free_);
  slab_free_ = number;
  ++slab_holes_;
}

// Rows from beyond the number of live rows move into the holes below it.
void SlotTable::compact_slab() {
  const auto live = static_cast<std::uint32_t>(size_);
  std::vector<std::uint32_t> holes;
  holes.reserve(slab_holes_);
  for (std::uint32_t hole = slab_free_; hole != kNoRow; hole = load<std::uint32_t>(slab_row(hole))) {
    if (hole < live) {
      holes.push_back(hole);
    }
  }
  for (std::size_t b = 0; b < buckets_; ++b) {
    const std::size_t n = filled(b);
    for (std::size_t c = 0; c < n; ++c) {
      const auto number = load<std::uint32_t>(payload(b, c));
      if (number >= live) {
        std::memcpy(slab_row(holes.back()), slab_row(number), layout_->row_bytes);
        keep(payload(b, c), holes.back());
        holes.pop_back();
      }
    }
  }
  slab_end_ = live;
  slab_free_ = kNoRow;
  slab_holes_ = 0;
  slab_.forget(std::size_t{slab_end_} * layout_->row_bytes);
}

// --- all rows ---------------------------------------------------------------------------------------------------

std::size_t SlotTable::bytes() const noexcept {
  return index_.bytes() + Region::rounded(std::size_t{slab_end_} * layout_->row_bytes);
}

std::vector<SlotTable::Entry> SlotTable::entries() const {
  std::vector<Entry> all;
  all.reserve(size_);
  // The slot bits are the same in every cell, so cells and hashes have one order; entries() gives hashes.
  for (std::size_t b = 0; b < buckets_; ++b) {
    const std::size_t n = filled(b);
    for (std::size_t c = 0; c < n; ++c) {
      all.push_back({(cell(b, c) & ~in_use_) | first_hash_, row_at(payload(b, c))});
    }
  }
  std::sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) { return a.hash < b.hash; });
  return all;
}

int SlotTable::verify() const {
  std::size_t count = 0;
  std::vector<std::uint64_t> cells_seen;
  std::vector<std::uint8_t> numbers(slab_end_, 0);
  for (std::size_t b = 0; b < buckets_; ++b) {
    const std::size_t n = filled(b);
    for (std::size_t c = n; c < layout_->cells; ++c) {
      if (cell(b, c) != 0) {
        return 1;
      }
    }
    for (std::size_t c = 0; c < n; ++c, ++count) {
      const std::uint64_t here = cell(b, c);
      cells_seen.push_back(here);
      if ((here & in_use_) != in_use_) {
        return 2;
      }
      for (std::size_t walk = home(here); walk != b; walk = after(walk)) {
        if (!full(walk)) {
          return 3;
        }
      }
      if (!layout_->narrow) {
        const auto number = load<std::uint32_t>(payload(b, c));
        if (number >= slab_end_ || numbers[number]++ != 0) {
          return 5;
        }
      }
    }
  }
  std::sort(cells_seen.begin(), cells_seen.end());
  if (std::adjacent_find(cells_seen.begin(), cells_seen.end()) != cells_seen.end()) {
    return 2;
  }
  if (count != size_ || size_ > limit_ || (buckets_ > 0 && limit_ >= cells())) {
    return 4;
  }
  std::size_t holes = 0;
  for (std::uint32_t hole = slab_free_; hole != kNoRow; hole = load<std::uint32_t>(slab_row(hole)), ++holes) {
    if (hole >= slab_end_ || numbers[hole]++ != 0) {
      return 5;
    }
  }
  return layout_->narrow || (holes == slab_holes_ && holes + size_ == slab_end_) ? 0 : 5;
}

}  // namespace shoal
