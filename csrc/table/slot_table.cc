#include "table/slot_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "table/match.h"

namespace shoal {

namespace {

constexpr double kRung = 1.125;

// The highest load of a bucket width, where a hit reads 1.65 lines at four cells.
double highest_load(std::size_t cells) noexcept {
  switch (cells) {
    case 2:
      return 0.78;
    case 3:
      return 0.84;
    default:
      return 0.87;
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

void fetch(const std::byte* line) noexcept { __builtin_prefetch(line, 1, 0); }

}  // namespace

SlotTable::SlotTable(const Layout& layout, Slot slot)
    : layout_(&layout),
      first_hash_(layout.slots.first_hash(slot)),
      in_use_(~(~std::uint64_t{0} >> layout.slots.bits())),
      load_limit_(highest_load(layout.cells)),
      // The golden ratio's multiples spread any run of slot numbers evenly.
      phase_(static_cast<double>(index_of(slot) * 0x9e3779b9U) * 0x1p-32) {}

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

namespace {

// The part of a table that a search reads.
struct Buckets {
  std::byte* lines;
  std::size_t count;
  unsigned slot_bits;
  std::uint64_t in_use;
};

// In rounds: round 0 looks at every hash's home, the next at the following bucket for those whose bucket was full of
// others, whose line has been fetched meanwhile. (With a loop per hash, each displaced hash cost the latency of its second
// line: a third of the speed at a load of 0.9.)
template <std::size_t kCells, std::size_t kPayload, class Match>
SHOAL_INLINE void find_round(const Buckets& table, std::span<const std::uint64_t> hashes,
                             std::span<std::byte*> rows) noexcept {
  std::byte* const lines = table.lines;
  const std::size_t count = table.count;
  const unsigned slot_bits = table.slot_bits;
  const std::uint64_t in_use = table.in_use;
  std::array<std::uint32_t, SlotTable::kRound> open;   // hashes that are not found yet
  std::array<std::size_t, SlotTable::kRound> open_at;  // the bucket to look at next
  std::size_t left = 0;
  const auto look = [&](std::size_t i, std::size_t b) __attribute__((always_inline)) {
    std::byte* const line = lines + b * kCacheLine;
    const unsigned match = Match::template in<kCells>(line, hashes[i] | in_use);
    const bool goes_on = match == 0 && load<std::uint64_t>(line + (kCells - 1) * sizeof(std::uint64_t)) != 0;
    const auto cell = static_cast<std::size_t>(std::countr_zero(match | (1U << kCells)));
    rows[i] = match != 0 ? line + kCells * sizeof(std::uint64_t) + cell * kPayload : nullptr;
    if (goes_on) [[unlikely]] {
      open[left] = static_cast<std::uint32_t>(i);
      open_at[left++] = b + 1 == count ? 0 : b + 1;
      fetch(line +
            kCacheLine);  // one: fetching further ahead was slower, fetching for every hash slower still
    }
  };
  const std::size_t last = hashes.size() - 1;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint64_t ahead = hashes[std::min(i + SlotTable::kAhead, last)];
    fetch(lines + scale(ahead << slot_bits, count) * kCacheLine);
    look(i, scale(hashes[i] << slot_bits, count));
  }
  while (left != 0) {
    const std::size_t round = std::exchange(left, 0);
    for (std::size_t k = 0; k < round; ++k) {
      look(open[k], open_at[k]);  // writes at `left`, which is at most k
    }
  }
}

template <class Match>
SHOAL_INLINE void find_by(std::size_t payload_bytes, const Buckets& table,
                          std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) noexcept {
  switch (payload_bytes) {
    case 4:
      return find_round<5, 4, Match>(table, hashes, rows);
    case 8:
      return find_round<4, 8, Match>(table, hashes, rows);
    case 12:
      return find_round<3, 12, Match>(table, hashes, rows);
    default:
      return find_round<2, 16, Match>(table, hashes, rows);
  }
}

#if defined(__x86_64__)
SHOAL_AVX2 void find_avx2(std::size_t payload_bytes, const Buckets& table,
                          std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) noexcept {
  find_by<Avx2Match>(payload_bytes, table, hashes, rows);
}
#endif

void find_portable(std::size_t payload_bytes, const Buckets& table, std::span<const std::uint64_t> hashes,
                   std::span<std::byte*> rows) noexcept {
  find_by<PortableMatch>(payload_bytes, table, hashes, rows);
}

}  // namespace

void SlotTable::find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) const noexcept {
  if (size_ == 0) {
    std::fill(rows.begin(), rows.end(), nullptr);
    return;
  }
#if defined(__x86_64__)
  const auto find_some = has_avx2() ? &find_avx2 : &find_portable;
#else
  const auto find_some = &find_portable;
#endif
  const Buckets table{bucket(0), buckets_, layout_->slots.bits(), in_use_};
  for (std::size_t first = 0; first < rows.size(); first += kRound) {
    find_some(layout_->payload_bytes, table, hashes.subspan(first),
              rows.subspan(first, std::min(kRound, rows.size() - first)));
  }
  if (layout_->narrow) {
    return;
  }
  constexpr std::size_t kFetched =
      8 * kCacheLine;  // beyond it the machine's own prefetcher has seen the pattern
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
  limit_ = buckets == 0
               ? 0
               : std::min(cells() - 1, static_cast<std::size_t>(static_cast<double>(cells()) * load_limit_));
}

std::size_t SlotTable::rung_above(std::size_t rows) const noexcept {
  const double rungs = std::ceil(std::log(static_cast<double>(rows)) / std::log(kRung) - phase_);
  return static_cast<std::size_t>(std::pow(kRung, rungs + phase_)) + 1;
}

void SlotTable::make_room(std::size_t more) {
  if (!has_room(more)) {
    reserve(rung_above(size_ + more));
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
      std::memcpy(place_cell(kept, true), line + cell_bytes + c * layout_->payload_bytes,
                  layout_->payload_bytes);
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
        std::memmove(lifted.data() + held * stride, lifted.data() + i * stride,
                     stride);  // held <= i: already put
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
  const auto distance = [this](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + buckets_ - from;
  };
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
    const std::size_t buckets = buckets_for(rung_above(size_));
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
