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

namespace shoal {

namespace {

// From kLarge rows on a slot grows by 1/8; below, where memory is little and keys come fastest, by 1/2: a key is moved
// two or three times then, and not five.
constexpr double kLarge = 4096;
constexpr double kGrowth = 1.125;
constexpr double kSmallGrowth = 1.5;

// The highest load of a bucket width, where a hit reads 1.22 lines at four cells.
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

}  // namespace

// Cells on their way from one bucket to another, chained by their old homes: each of kReach chains holds the cells whose
// homes leave one remainder. Room for all of a table's cells, and but for chosen keys a few dozen are in it at a time.
// A thread keeps its room from one growth to the next; what nobody wrote takes no memory.
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
  // For the end.
  void hold(std::uint64_t cell, const std::byte* payload) noexcept { push_onto(held_, kEnd, cell, payload); }

  // Takes out the cells of one home that put(cell, payload) finds a place for.
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
      // The golden ratio's multiples spread any run of slot numbers evenly.
      phase_(static_cast<double>(index_of(slot) * 0x9e3779b9U) * 0x1p-32) {}

// --- where things stand -----------------------------------------------------------------------------------------

std::size_t SlotTable::home(std::uint64_t cell) const noexcept {
  return scale(probe_key(cell) << layout_->slots.bits(), buckets_);
}

std::size_t SlotTable::second_of(std::uint64_t cell, std::size_t home) const noexcept {
  const std::size_t b = second(probe_key(cell), home);
  return b < buckets_ ? b : b % buckets_;
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

void SlotTable::copy_payload(std::byte* to, const std::byte* from) const noexcept {
  switch (layout_->payload_bytes) {  // a copy of a known size is one or two instructions
    case 4:
      return keep(to, load<std::array<std::byte, 4>>(from));
    case 8:
      return keep(to, load<std::array<std::byte, 8>>(from));
    case 12:
      return keep(to, load<std::array<std::byte, 12>>(from));
    default:
      return keep(to, load<std::array<std::byte, 16>>(from));
  }
}

std::size_t SlotTable::filled(std::size_t b) const noexcept {
  std::size_t n = 0;
  for (std::size_t c = 0; c < layout_->cells; ++c) {  // all of them: how many is anybody's guess
    n += cell(b, c) != 0 ? 1U : 0U;
  }
  return n;
}

bool SlotTable::full(std::size_t b) const noexcept { return cell(b, layout_->cells - 1) != 0; }

std::byte* SlotTable::row_at(std::byte* payload) const noexcept {
  return layout_->narrow ? payload : slab_.row(load<std::uint32_t>(payload));
}

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
  const double rung = static_cast<double>(rows) < kLarge ? kSmallGrowth : kGrowth;
  const double rungs = std::ceil(std::log(static_cast<double>(rows) / kLarge) / std::log(rung) - phase_);
  return static_cast<std::size_t>(kLarge * std::pow(rung, rungs + phase_)) + 1;
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

// Places the cells of another index in this one, which is empty.
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

// Where there is no memory for a second index, the slot stays as it is, correct and slow, and the next insert that probes
// far tries again.
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

// Moves the first `old_buckets` buckets' cells to their homes among all, from the last home to the first: what is lifted
// out when a home's turn comes stood at or behind it, and goes to a new home at or behind it, where all is done already.
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

  // Those whose ways led round the old end stand before their homes.
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
    // Those whose new ways lead round the end wait for it.
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

// --- erasing ----------------------------------------------------------------------------------------------------

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
    b = at_home ? second_of(wanted, b) : after(b);
  }
}

void SlotTable::remove_cell(std::size_t b, std::size_t c) noexcept {
  ++version_;
  const std::size_t last = filled(b) - 1;
  keep(bucket(b) + c * sizeof(std::uint64_t), cell(b, last));
  copy_payload(payload(b, c), payload(b, last));
  keep(bucket(b) + last * sizeof(std::uint64_t), std::uint64_t{0});
}

// Whether bucket b is on the way of a hash to where it stands.
bool SlotTable::on_probe_sequence(std::uint64_t cell, std::size_t stands, std::size_t b) const noexcept {
  const std::size_t first = home(cell);
  if (stands == first) {
    return false;
  }
  const std::size_t other = second_of(cell, first);
  return b == first || distance(other, b) < distance(other, stands);
}

// The bucket and cell of a hash that passed over bucket b on its way; b where there is none. Seconds stand at most kReach
// behind b, and what went on from there stands behind full buckets.
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

// Bucket b was full and lost a cell: one that had passed over it must come back (I3), and leaves a gap where it was.
void SlotTable::close_gap(std::size_t b) noexcept {
  for (bool was_full = true; was_full;) {
    const auto [j, c] = one_that_passed(b);
    if (j == b) {
      return;
    }
    was_full = full(j);
    copy_payload(take_cell(b, filled(b), cell(j, c)), payload(j, c));
    remove_cell(j, c);
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
  keep(slab_.row(number), slab_free_);
  slab_free_ = number;
  ++slab_holes_;
}

// Rows from beyond the number of live rows move into the holes below it.
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
        keep(payload(b, c), holes.back());
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

// --- all rows ---------------------------------------------------------------------------------------------------

std::size_t SlotTable::bytes() const noexcept { return index_.bytes() + slab_.bytes(); }

namespace {

// Where many share a place, chosen by an adversary, an insertion sort would take for ever: `moves` are left to it.
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

// Places rise with the hash. Counted and poured by places finer than homes, which few hashes share, rows are in order but
// for those few. That is done window by window, so that counters, buckets and rows stay in the nearest cache: a row stands
// in its home's window or in the next. Those that stand elsewhere, round the end or behind many kin, are merged in last.
// Which cells are empty cannot be guessed, so there is no branch on it: they have a counter and a row of their own.
std::vector<SlotTable::Entry> SlotTable::entries() const {
  if (is_scrambled()) {
    std::vector<Entry> all;
    all.reserve(size_);
    each_row([&](std::uint64_t hash, const std::byte* row) { all.push_back({hash, row}); });
    std::ranges::sort(all, {}, &Entry::hash);
    return all;
  }
  constexpr std::size_t kFine = 8;              // places of a bucket
  constexpr std::size_t kBuckets = 2 * kReach;  // of a window
  constexpr std::size_t kWindow = kBuckets * kFine;
  constexpr std::size_t kRing = 4 * kWindow;  // of which three windows are in use at a time
  constexpr std::size_t kMaxCells = kCacheLine / sizeof(std::uint64_t);
  const std::size_t places = buckets_ * kFine;
  const std::size_t cells = layout_->cells;
  const unsigned slot_bits = layout_->slots.bits();
  const auto entry = [this, cells, lines = index_.data(), wide = !layout_->narrow, hash_bits = ~in_use_,
                      slot = first_hash_, payload_bytes = layout_->payload_bytes](
                         std::size_t b, std::size_t c, bool there) -> Entry {
    const std::byte* const line = lines + b * kCacheLine;
    const std::byte* row = line + cells * sizeof(std::uint64_t) + c * payload_bytes;
    if (wide) {  // what stands beside an empty cell names no row
      row = there ? slab_.row(load<std::uint32_t>(row)) : nullptr;
    }
    return {(load<std::uint64_t>(line + c * sizeof(std::uint64_t)) & hash_bits) | slot, row};
  };
  std::vector<Entry> all(size_ + 1);  // the last for empty cells
  std::vector<Entry> strays;
  std::array<std::uint32_t, kRing + 1> next;  // how many rows a place has; then where its next one goes
  std::array<std::array<std::uint16_t, kBuckets * kMaxCells>, 2> at_cells;  // of each cell of two windows
  next[kRing] = 0;

  const auto ring_of = [&](std::size_t window) {
    return std::span(next).subspan(window * kWindow % kRing, kWindow);
  };
  const auto buckets_of = [&](std::size_t window) {
    return std::pair(window * kBuckets, std::min(buckets_, (window + 1) * kBuckets));
  };
  const auto count = [&](std::size_t window) {
    std::ranges::fill(ring_of(window), 0U);
    std::uint16_t* its = at_cells[window % 2].data();
    const auto [first, last] = buckets_of(window);
    std::uint64_t any = 0;
    for (std::size_t b = first; b < last; ++b) {
      for (std::size_t c = 0; c < cells; ++c) {
        const std::uint64_t here = cell(b, c);
        const std::size_t place = scale(here << slot_bits, places);
        const std::uint64_t strayed = window - place / kWindow > 1;  // below 0, too
        const std::uint64_t there = here >> 63U;                     // a slot bit
        any |= strayed & there;
        const std::uint64_t mask = ~strayed & there;  // no branch
        const std::size_t at = kRing + mask * (place % kRing - kRing);
        *its++ = static_cast<std::uint16_t>(at);
        ++next[at];
      }
    }
    its = at_cells[window % 2].data();
    for (std::size_t b = first; b < last && any != 0; ++b) {
      for (std::size_t c = 0; c < cells; ++c, ++its) {
        if (*its == kRing && cell(b, c) != 0) {
          strays.push_back(entry(b, c, true));
        }
      }
    }
  };
  const auto pour = [&](std::size_t window) {
    const std::uint16_t* its = at_cells[window % 2].data();
    const auto [first, last] = buckets_of(window);
    next[kRing] = static_cast<std::uint32_t>(size_);
    for (std::size_t b = first; b < last; ++b) {
      for (std::size_t c = 0; c < cells; ++c) {
        const std::size_t at = *its++;
        const std::uint32_t row = next[at];
        all[row] = entry(b, c, at != kRing);
        next[at] = row + static_cast<std::uint32_t>(at != kRing);
      }
    }
  };

  const std::size_t windows = (buckets_ + kBuckets - 1) / kBuckets;
  std::size_t moves = 4 * size_;
  std::size_t done = 0;   // rows in order
  std::size_t begin = 0;  // where the rows of a window's places go
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
    sort_nearly_sorted(std::span(all).subspan(done, begin - done),
                       moves);  // of the window before, complete now
    done = begin;
    begin = end;
  }
  sort_nearly_sorted(std::span(all).subspan(done, begin - done), moves);
  all.pop_back();
  std::ranges::sort(strays, {}, &Entry::hash);
  std::ranges::copy(strays, all.begin() + static_cast<std::ptrdiff_t>(begin));
  std::ranges::inplace_merge(all, all.begin() + static_cast<std::ptrdiff_t>(begin), {}, &Entry::hash);
  return all;
}

bool SlotTable::has_image_room(const ImageBytes& bytes) const noexcept {
  return bytes.index <= index_.bytes() && slab_.has_image_room(bytes.slab);
}

void SlotTable::make_image_room(const ImageBytes& bytes) {
  if (bytes.index > index_.bytes()) {
    index_ = Region();  // what an image held is of no use
    index_.resize(Region::rounded(bytes.index + bytes.index / 4));
    index_.populate(0);
  }
  slab_.make_image_room(bytes.slab);
}

void SlotTable::become_image_of(const SlotTable& of) {
  make_image_room(of.image_bytes());
  if (of.buckets_ != 0) {
    std::memcpy(index_.data(), of.index_.data(), of.buckets_ * kCacheLine);
  }
  slab_.become_image_of(of.slab_);
  layout_ = of.layout_;
  buckets_ = of.buckets_;
  size_ = of.size_;
  limit_ = of.limit_;
  in_use_ = of.in_use_;
  first_hash_ = of.first_hash_;
  scramble_ = of.scramble_;
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
      std::size_t way = home(here);
      for (bool at_home = true; way != b; at_home = false) {
        if (!full(way)) {
          return 3;
        }
        way = at_home ? second_of(here, way) : after(way);
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
  for (std::uint32_t hole = slab_free_; hole != kNoRow;
       hole = load<std::uint32_t>(slab_.row(hole)), ++holes) {
    if (hole >= slab_end_ || numbers[hole]++ != 0) {
      return 5;
    }
  }
  return layout_->narrow || (holes == slab_holes_ && holes + size_ == slab_end_ && slab_end_ <= slab_.rows())
             ? 0
             : 5;
}

}  // namespace shoal
