#include "table/slot_table.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "base/prefetch.h"
#include "base/secret.h"
#include "table/probe.h"
#include "table/slot_table_cells.h"

namespace shoal {

using cells::keep;
using cells::load;

namespace {

// From kLarge rows on a slot grows by 1/8. Below, it grows by 1/2, so a key is moved two or three times instead of
// five: little memory is at stake there, and keys arrive fastest.
constexpr double kLarge = 4096;
constexpr double kGrowth = 1.125;
constexpr double kSmallGrowth = 1.5;

// The highest load by bucket width. At four cells a hit then reads 1.22 lines.
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

}  // namespace

// Cells that are being moved from one bucket to another, in kReach chains by home modulo kReach. Has room for all
// cells of the table; unless keys are chosen to collide, it holds a few dozen at a time. Each thread keeps its room
// from one growth to the next; pages that were never written take no memory.
class SlotTable::DisplacedEntries {
 public:
  explicit DisplacedEntries(const SlotTable& table) : table_(table) {
    if (room_.bytes() < table.cells() * sizeof(Cell)) {
      room_.resize(table.cells() * sizeof(Cell));
    }
    cells_ = reinterpret_cast<Cell*>(room_.data());
    chains_.fill(kEnd);
  }
  ~DisplacedEntries() {
    if (end_ > kKept) {
      room_ = Region();
    }
  }
  DisplacedEntries(const DisplacedEntries&) = delete;
  DisplacedEntries& operator=(const DisplacedEntries&) = delete;

  void push(std::uint32_t home, std::uint64_t cell, const std::byte* payload) noexcept {
    push_onto(chains_[home % kReach], home, cell, payload);
  }
  // Holds a cell until the end of the move.
  void hold(std::uint64_t cell, const std::byte* payload) noexcept { push_onto(held_, kEnd, cell, payload); }

  // Removes the cells of one home for which put(cell, payload) returns true.
  template <class Put>
  void take(std::uint32_t home, const Put& put) noexcept {
    take_from(chains_[home % kReach], home, put);
  }
  template <class Put>
  void take_held(const Put& put) noexcept {
    take_from(held_, kEnd, put);
  }

 private:
  struct Cell {
    std::uint64_t cell;
    std::uint32_t home;
    std::uint32_t next;
    std::byte payload[Layout::kMaxNarrowBytes];
  };
  static constexpr std::uint32_t kEnd = ~std::uint32_t{0};
  static constexpr std::uint32_t kKept = 4096;  // cells: 128 KiB

  void push_onto(std::uint32_t& chain, std::uint32_t home, std::uint64_t cell,
                 const std::byte* payload) noexcept {
    const std::uint32_t i = free_ == kEnd ? end_++ : std::exchange(free_, cells_[free_].next);
    cells_[i].cell = cell;
    cells_[i].home = home;
    cells_[i].next = std::exchange(chain, i);
    table_.copy_payload(cells_[i].payload, payload);
  }
  template <class Put>
  void take_from(std::uint32_t& chain, std::uint32_t home, const Put& put) noexcept {
    for (std::uint32_t* link = &chain; *link != kEnd;) {
      Cell& at = cells_[*link];
      if (at.home == home && put(at.cell, at.payload)) {
        const std::uint32_t freed = std::exchange(*link, at.next);
        at.next = std::exchange(free_, freed);
      } else {
        link = &at.next;
      }
    }
  }

  static inline thread_local Region room_;

  const SlotTable& table_;
  Cell* cells_;
  std::array<std::uint32_t, kReach> chains_;
  std::uint32_t held_ = kEnd;
  std::uint32_t free_ = kEnd;
  std::uint32_t end_ = 0;
};

SlotTable::SlotTable(const Layout& layout, Slot slot, Chunks& chunks) : SlotTable(layout, slot) {
  slab_ = Slab(chunks);
}

SlotTable::SlotTable(const Layout& layout, Slot slot)
    : layout_(&layout),
      in_use_(~(~std::uint64_t{0} >> layout.slots.bits())),
      first_hash_(layout.slots.first_hash(slot)),
      load_limit_(highest_load(layout.cells)),
      // Multiples of the golden ratio are spread evenly for any run of slot numbers.
      phase_(static_cast<double>(index_of(slot) * 0x9e3779b9U) * 0x1p-32) {}

// --- finding ----------------------------------------------------------------------------------------------------

SlotTable::Buckets SlotTable::buckets() noexcept {
  alignas(kCacheLine) static constinit std::byte nothing[kCacheLine] = {};
  return buckets_ == 0 ? Buckets{nothing, 1, 0} : Buckets{bucket(0), buckets_, scramble_};
}

void SlotTable::find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) {
  Probe probes[]{Probe(*layout_), Probe(*layout_)};
  const auto prepare = [&](Probe& probe, std::size_t first) {
    probe.start(hashes.data() + first);
    probe.prepare(*this, std::min(Probe::kMax, rows.size() - first));
  };
  if (!rows.empty()) {
    prepare(probes[0], 0);
    probes[0].home_lines().drain();
  }
  for (std::size_t first = 0, turn = 0; first < rows.size(); first += Probe::kMax, turn ^= 1U) {
    PrefetchCursor ahead;
    if (first + Probe::kMax < rows.size()) {
      prepare(probes[turn ^ 1U], first + Probe::kMax);
      ahead = probes[turn ^ 1U].home_lines();
    }
    probes[turn].probe(ahead);
    ahead.drain();
    probes[turn].resolve();
    std::copy(probes[turn].rows().begin(), probes[turn].rows().end(),
              rows.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

std::byte* SlotTable::find_one(std::uint64_t hash) noexcept {
  std::byte* const at = size_ == 0 ? nullptr : payload_of(cell_of(hash));
  return at == nullptr ? nullptr : row_at(at);
}

std::byte* SlotTable::payload_of(std::uint64_t wanted) const noexcept {
  std::size_t b = home(wanted);
  for (bool at_home = true;; at_home = false) {
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      if (cell(b, c) == wanted) {
        return payload(b, c);
      }
    }
    if (!full(b)) {
      return nullptr;
    }
    b = at_home ? second_of(wanted, b) : after(b);
  }
}

void SlotTable::prefetch(std::uint64_t hash) const noexcept {
  if (buckets_ != 0) {
    shoal::prefetch(bucket(home(cell_of(hash))));
  }
}

// --- inserting and growing --------------------------------------------------------------------------------------

std::byte* SlotTable::take_cell(std::size_t b, std::size_t c, std::uint64_t cell) noexcept {
  keep(bucket(b) + c * sizeof cell, cell);
  return payload(b, c);
}

std::byte* SlotTable::place_cell(std::uint64_t cell, bool wrap) noexcept {
  const std::size_t first = home(cell);
  if (!full(first)) {
    return take_cell(first, filled(first), cell);
  }
  const std::size_t other = second_of(cell, first);
  if (other <= first && !wrap) {
    return nullptr;
  }
  if (!full(other)) {
    return take_cell(other, filled(other), cell);
  }
  for (const std::size_t b : {first, other}) {
    const std::size_t c = free_by_moving(b, wrap);
    if (c != layout_->cells) {
      return take_cell(b, c, cell);
    }
  }
  std::size_t b = other;
  for (std::size_t passed = 0; full(b); ++passed) {
    if (b + 1 == buckets_ && !wrap) {
      return nullptr;
    }
    b = after(b);
    probed_far_ |= passed == kLongestProbe;
  }
  return take_cell(b, filled(b), cell);
}

std::size_t SlotTable::free_by_moving(std::size_t b, bool wrap) noexcept {
  for (std::size_t c = 0; c < layout_->cells; ++c) {
    const std::uint64_t here = cell(b, c);
    const std::size_t to = second_of(here, b);
    if (home(here) == b && !full(to) && (to > b || wrap)) {
      copy_payload(take_cell(to, filled(to), here), payload(b, c));
      ++version_;
      return c;
    }
  }
  return layout_->cells;
}

std::byte* SlotTable::insert(std::uint64_t hash) noexcept {
  SHOAL_DCHECK(has_room(1));
  probed_far_ = false;
  std::byte* at = place_cell(cell_of(hash), true);
  ++size_;
  if (probed_far_ && !is_scrambled()) [[unlikely]] {
    scramble();
    at = payload_of(cell_of(hash));
  }
  if (layout_->narrow) {
    return at;
  }
  const std::uint32_t number = take_row();
  keep(at, number);
  return slab_.row(number);
}

std::size_t SlotTable::buckets_for(std::size_t rows) const noexcept {
  const auto cells = static_cast<std::size_t>(static_cast<double>(rows + 1) / load_limit_) + 1;
  return Region::rounded((cells + layout_->cells - 1) / layout_->cells * kCacheLine) / kCacheLine;
}

void SlotTable::set_buckets(std::size_t buckets) noexcept {
  ++version_;
  buckets_ = buckets;
  limit_ = limit_of(buckets);
}

std::size_t SlotTable::limit_of(std::size_t buckets) const noexcept {
  const std::size_t cells = buckets * layout_->cells;
  return buckets == 0
             ? 0
             : std::min(cells - 1, static_cast<std::size_t>(static_cast<double>(cells) * load_limit_));
}

std::size_t SlotTable::bytes_with(std::size_t more, bool exactly) const noexcept {
  const std::size_t buckets =
      index_has_room(more) ? buckets_ : buckets_for(exactly ? size_ + more : size_class_above(size_ + more));
  const std::size_t index = buckets == buckets_ ? index_.bytes() : Region::rounded(buckets * kCacheLine);
  if (layout_->narrow || more <= slab_holes_) {
    return index + slab_.bytes();
  }
  const std::size_t rows = slab_end_ + more - slab_holes_;
  return index + slab_.bytes_with(rows, std::max(rows, slab_holes_ + limit_of(buckets)));
}

std::size_t SlotTable::size_class_above(std::size_t rows) const noexcept {
  const double ratio = static_cast<double>(rows) < kLarge ? kSmallGrowth : kGrowth;
  const double exponent = std::ceil(std::log(static_cast<double>(rows) / kLarge) / std::log(ratio) - phase_);
  return static_cast<std::size_t>(kLarge * std::pow(ratio, exponent + phase_)) + 1;
}

void SlotTable::make_room(std::size_t more) {
  if (!index_has_room(more)) {
    grow_index(size_class_above(size_ + more));
  }
  make_slab_room(more);
}

void SlotTable::reserve(std::size_t rows) {
  if (rows > limit_) {
    grow_index(rows);
  }
  if (rows > size_) {
    make_slab_room(rows - size_);
  }
}

void SlotTable::grow_index(std::size_t rows) {
  SHOAL_CHECK(rows < kNoRow, "one slot of the store would hold 2^32 rows: choose more slots");
  resize_index(buckets_for(rows));
}

void SlotTable::resize_index(std::size_t buckets) {
  if (buckets > buckets_) {
    using Clock = std::chrono::steady_clock;
    const auto nanoseconds = [](Clock::duration d) {
      return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(d).count());
    };
    const std::size_t old_buckets = buckets_;
    const auto start = Clock::now();
    DisplacedEntries displaced(*this);  // before the first change
    index_.resize(buckets * kCacheLine);
    index_.populate(old_buckets * kCacheLine);
    const auto ready = Clock::now();
    set_buckets(buckets);
    spread(old_buckets, displaced);
    const std::uint64_t moving = nanoseconds(Clock::now() - ready);
    growth_ = {.times = growth_.times + 1,
               .memory_ns = growth_.memory_ns + nanoseconds(ready - start),
               .moving_ns = growth_.moving_ns + moving,
               .longest_ns = std::max(growth_.longest_ns, moving)};
    return;
  }
  Region old(buckets * kCacheLine);
  std::swap(old, index_);
  const std::size_t old_buckets = buckets_;
  set_buckets(buckets);
  refill_from(old, old_buckets);
}

// Inserts the cells of another index into this one, which is empty.
void SlotTable::refill_from(const Region& index, std::size_t buckets) noexcept {
  const std::size_t cell_bytes = layout_->cells * sizeof(std::uint64_t);
  for (std::size_t b = 0; b < buckets; ++b) {
    const std::byte* const line = index.data() + b * kCacheLine;
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      const auto kept = load<std::uint64_t>(line + c * sizeof(std::uint64_t));
      if (kept == 0) {
        break;
      }
      copy_payload(place_cell(kept, true), line + cell_bytes + c * layout_->payload_bytes);
    }
  }
}

// Without memory for a second index the slot stays as it is, correct but slow, and the next insert that passes
// kLongestProbe buckets tries again.
void SlotTable::scramble() noexcept {
  Region old;
  try {
    old.resize(buckets_ * kCacheLine);
  } catch (const std::bad_alloc&) {
    return;
  }
  std::swap(old, index_);
  ++version_;
  scramble_ = process_secret();
  refill_from(old, buckets_);
}

// Moves the cells of the first `old_buckets` buckets to their new homes, from the last home to the first. When a home
// is processed, its cells have been removed from the buckets at or after it, and they go to a new home at or after
// it, where all cells are already placed.
void SlotTable::spread(std::size_t old_buckets, DisplacedEntries& displaced) noexcept {
  const auto old_home = [&](std::uint64_t here) {
    return static_cast<std::uint32_t>(scale(probe_key(here) << layout_->slots.bits(), old_buckets));
  };
  const auto put = [&](std::uint64_t here, const std::byte* from, bool wrap) {
    std::byte* const to = place_cell(here, wrap);
    if (to != nullptr) {
      copy_payload(to, from);
    }
    return to != nullptr;
  };

  // Cells whose probe sequences wrapped around the old end are stored before their homes.
  bool was_full = true;
  for (std::size_t b = 0; b < old_buckets && (b < kReach || was_full); ++b) {
    was_full = full(b);
    for (std::size_t c = filled(b); c-- > 0;) {
      const std::uint64_t here = cell(b, c);
      if (old_home(here) > b) {
        displaced.push(old_home(here), here, payload(b, c));
        remove_cell(b, c);
      }
    }
  }
  for (std::size_t b = old_buckets; b-- > 0;) {
    alignas(kCacheLine) std::byte line[kCacheLine];
    std::memcpy(line, bucket(b), kCacheLine);
    std::memset(bucket(b), 0, kCacheLine);
    // Cells whose new probe sequences wrap around the end are held until the end of the move.
    const auto put_or_hold = [&](std::uint64_t here, const std::byte* from) {
      if (!put(here, from, false)) {
        displaced.hold(here, from);
      }
      return true;
    };
    displaced.take(static_cast<std::uint32_t>(b), put_or_hold);
    for (std::size_t c = 0; c < layout_->cells; ++c) {
      const auto here = load<std::uint64_t>(line + c * sizeof(std::uint64_t));
      if (here == 0) {
        break;
      }
      const std::byte* const from =
          line + layout_->cells * sizeof(std::uint64_t) + c * layout_->payload_bytes;
      const std::uint32_t home_before = old_home(here);
      if (home_before != b) {
        displaced.push(home_before, here, from);
      } else {
        put_or_hold(here, from);
      }
    }
  }
  displaced.take_held([&](std::uint64_t here, const std::byte* from) { return put(here, from, true); });
}

}  // namespace shoal
