// The probe sequence of a hash is: its home (its position in the slot, scaled to the number of buckets, which
// never falls as the hash rises, so that a batch in hash order reads the table front to back), its second
// bucket up to BucketLines::kReach after the home, the buckets after the second, cyclically. An insert that
// finds both buckets full moves another hash from one of them to that hash's own second bucket, or else
// stores the new one in the first bucket after its second that is not full. A search stops at the first
// bucket that is not full, or that no hash has passed.
//
//   cell       the hash with its slot bits set to ones; 0 is an empty cell, so zeroed pages are an empty
//              table and no key is reserved (all hashes of a slot share their slot bits)
//   passed     two of the slot bits of a full bucket's last cell are zeros instead if hashes are stored
//              behind it: the first if it is the home of one, the second if it is the second bucket of one,
//              or a later one. With fewer than 8 slots there are no such bits, and every full bucket counts
//              as passed.
//   growing    extends the memory in place, by 1/8 (below 4096 rows by 1/2), then moves cells from the last
//              bucket to the first: homes only move up. Cells whose homes are full by then are put aside, and
//              inserted at the end. Size classes are shifted by slot, so that slots do not all grow at once.
//   erasing    moves a cell whose probe sequence crosses the freed cell into it: no tombstones. A table below
//              half of its limit is rebuilt smaller.
//   wide rows  lie in a slab and are addressed by row number (table/slab.h); free numbers form a chain
//              through the free rows, and the slab is compacted once a quarter of it is free.
//
// An adversary can choose keys with colliding hashes. An insert that passes kLongestProbe buckets therefore
// scrambles the slot: from then on a second mix with a per-process secret (probe_key) determines where its
// hashes are stored. No result and no saved byte depends on where a row is stored; only iterating a scrambled
// slot in hash order needs a sort.

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

// Cells that wait for the end of a growth, and their payloads. Has room for all cells of the table; unless
// keys are chosen to collide, every eighth waits. Each thread keeps its room from one growth to the next;
// pages that were never written take no memory.
template <std::size_t kPayload>
class SlotTable::WaitingCells {
 public:
  WaitingCells(std::size_t cells, std::size_t buckets) {
    const std::size_t bytes = (cells + 1) * sizeof(Cell) + buckets;
    if (room_.bytes() < bytes) {
      room_.resize(bytes);
    }
    placed_ = reinterpret_cast<std::uint8_t*>(room_.data());
    std::memset(placed_, 0, buckets);
    cells_ = reinterpret_cast<Cell*>(room_.data() + (buckets + 7) / 8 * 8);
  }
  ~WaitingCells() {
    if (size_ > kKept) {
      room_ = Region();
    }
  }
  WaitingCells(const WaitingCells&) = delete;
  WaitingCells& operator=(const WaitingCells&) = delete;

  struct Cell {
    std::uint64_t cell;
    std::array<std::byte, kPayload> payload;
  };
  Cell* data() noexcept { return cells_; }
  std::uint8_t* placed() noexcept { return placed_; }
  void set_end(const Cell* end) noexcept { size_ = static_cast<std::size_t>(end - cells_); }
  std::span<const Cell> cells() const noexcept { return {cells_, size_}; }

 private:
  static constexpr std::size_t kKept = 4096;

  static inline thread_local Region room_;

  Cell* cells_;
  std::uint8_t* placed_;
  std::size_t size_ = 0;
};

SlotTable::SlotTable(const Layout& layout, Slot slot, Chunks& chunks) : SlotTable(layout, slot) {
  wide_ = WideRows(chunks);
}

SlotTable::SlotTable(const Layout& layout, Slot slot)
    : lines_{&layout},
      in_use_(~(~std::uint64_t{0} >> layout.slots.bits())),
      passed_(layout.slots),
      first_hash_(layout.slots.first_hash(slot)),
      classes_(layout, slot) {}

// --- finding -----------------------------------------------------------------------------------------------

SlotTable::Buckets SlotTable::buckets() noexcept {
  alignas(kCacheLine) static constinit std::byte nothing[kCacheLine] = {};
  return lines_.count == 0 ? Buckets{nothing, 1, 0}
                           : Buckets{lines_.bucket(0), lines_.count, lines_.scramble};
}

void SlotTable::find(std::span<const std::uint64_t> hashes, std::span<std::byte*> rows) {
  Probe probes[]{Probe(*lines_.layout), Probe(*lines_.layout)};
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

std::byte* SlotTable::find_one(std::uint64_t hash) const noexcept {
  std::byte* const at = size_ == 0 ? nullptr : payload_of(cell_of(hash));
  return at == nullptr ? nullptr : row_at(at);
}

std::byte* SlotTable::payload_of(std::uint64_t wanted) const noexcept {
  std::size_t b = lines_.home(wanted);
  for (bool at_home = true;; at_home = false) {
    for (std::size_t c = 0; c < lines_.layout->cells; ++c) {
      if (cell(b, c) == wanted) {
        return lines_.payload(b, c);
      }
    }
    if (!is_passed(b, at_home)) {
      return nullptr;
    }
    b = at_home ? lines_.second_of(wanted, b) : lines_.after(b);
  }
}

void SlotTable::prefetch(std::uint64_t hash) const noexcept {
  if (lines_.count != 0) {
    shoal::prefetch(lines_.bucket(lines_.home(cell_of(hash))));
  }
}

// --- inserting and growing ---------------------------------------------------------------------------------

std::byte* SlotTable::take_cell(std::size_t b, std::size_t c, std::uint64_t cell) noexcept {
  const std::uint64_t before = lines_.cell(b, c);
  const std::uint64_t passed =
      before == 0 ? 0 : passed_.both & ~before;  // what was said in this cell remains
  store(lines_.bucket(b) + c * sizeof cell, cell & ~passed);
  return lines_.payload(b, c);
}

std::byte* SlotTable::place_cell(std::uint64_t cell) noexcept {
  const std::size_t first = lines_.home(cell);
  if (!lines_.full(first)) {
    return take_cell(first, lines_.filled(first), cell);
  }
  const std::size_t other = lines_.second_of(cell, first);
  if (!lines_.full(other)) {
    lines_.set_passed(first, passed_.home);
    return take_cell(other, lines_.filled(other), cell);
  }
  if (const std::size_t c = free_by_moving(first); c != lines_.layout->cells) {
    return take_cell(first, c, cell);
  }
  lines_.set_passed(first, passed_.home);
  if (const std::size_t c = free_by_moving(other); c != lines_.layout->cells) {
    return take_cell(other, c, cell);
  }
  std::size_t b = other;
  for (std::size_t passed = 0; lines_.full(b); ++passed) {
    lines_.set_passed(b, passed_.later);
    b = lines_.after(b);
    probed_far_ |= passed == kLongestProbe;
  }
  return take_cell(b, lines_.filled(b), cell);
}

std::size_t SlotTable::free_by_moving(std::size_t b) noexcept {
  for (std::size_t c = 0; c < lines_.layout->cells; ++c) {
    const std::uint64_t stored = cell(b, c);
    const std::size_t to = lines_.second_of(stored, b);
    if (lines_.home(stored) == b && !lines_.full(to)) {
      lines_.copy_payload(take_cell(to, lines_.filled(to), stored), lines_.payload(b, c));
      lines_.set_passed(b, passed_.home);
      ++version_;
      return c;
    }
  }
  return lines_.layout->cells;
}

void SlotTable::prefetch_seconds(std::size_t b) const noexcept {
  for (std::size_t c = 0; c < lines_.layout->cells; ++c) {
    shoal::prefetch(lines_.bucket(lines_.second_of(cell(b, c), b)));
  }
}

std::byte* SlotTable::insert(std::uint64_t hash) noexcept {
  SHOAL_DCHECK(has_room(1));
  probed_far_ = false;
  std::byte* at = place_cell(cell_of(hash));
  ++size_;
  if (probed_far_ && !is_scrambled()) [[unlikely]] {
    scramble();
    at = payload_of(cell_of(hash));
  }
  return new_row(at);
}

std::byte* SlotTable::new_row(std::byte* payload) noexcept {
  if (lines_.layout->narrow) {
    return payload;
  }
  const std::uint32_t number = wide_.take();
  store(payload, number);
  return wide_.row(number);
}

void SlotTable::set_buckets(std::size_t buckets) noexcept {
  ++version_;
  lines_.count = buckets;
  limit_ = classes_.limit_of(buckets, lines_.layout->cells);
}

std::size_t SlotTable::bytes_with(std::size_t more, bool exactly) const noexcept {
  const std::size_t buckets = index_has_room(more)
                                  ? lines_.count
                                  : buckets_for(exactly ? size_ + more : classes_.rows_above(size_ + more));
  const std::size_t index =
      buckets == lines_.count ? lines_.memory.bytes() : Region::rounded(buckets * kCacheLine);
  return index + (lines_.layout->narrow
                      ? slab().bytes()
                      : wide_.bytes_with(more, classes_.limit_of(buckets, lines_.layout->cells)));
}

void SlotTable::make_room(std::size_t more) {
  if (!index_has_room(more)) {
    grow_index(classes_.rows_above(size_ + more));
  }
  if (!lines_.layout->narrow && wide_.make_room(more, limit_)) {
    ++version_;
  }
}

void SlotTable::reserve(std::size_t rows) {
  if (rows > limit_) {
    grow_index(rows);
  }
  if (rows > size_ && !lines_.layout->narrow && wide_.make_room(rows - size_, limit_)) {
    ++version_;
  }
}

void SlotTable::grow_index(std::size_t rows) {
  SHOAL_CHECK(rows < WideRows::kNone, "one slot of the store would hold 2^32 rows: choose more slots");
  resize_index(buckets_for(rows));
}

void SlotTable::resize_index(std::size_t buckets) {
  if (buckets > lines_.count) {
    using Clock = std::chrono::steady_clock;
    const auto nanoseconds = [](Clock::duration d) {
      return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(d).count());
    };
    const std::size_t old_buckets = lines_.count;
    const auto start = Clock::now();
    auto ready = start;
    with_payload_bytes(*lines_.layout,
                       [&]<std::size_t kPayload>(std::integral_constant<std::size_t, kPayload>) {
                         WaitingCells<kPayload> waiting(cells(), buckets);  // before the first change
                         lines_.memory.resize(buckets * kCacheLine);
                         lines_.memory.populate(old_buckets * kCacheLine);
                         ready = Clock::now();
                         set_buckets(buckets);
                         spread(old_buckets, waiting);
                       });
    const std::uint64_t moving = nanoseconds(Clock::now() - ready);
    growth_ = {.times = growth_.times + 1,
               .memory_ns = growth_.memory_ns + nanoseconds(ready - start),
               .moving_ns = growth_.moving_ns + moving,
               .longest_ns = std::max(growth_.longest_ns, moving)};
    return;
  }
  Region old(buckets * kCacheLine);
  std::swap(old, lines_.memory);
  const std::size_t old_buckets = lines_.count;
  set_buckets(buckets);
  refill_from(old, old_buckets);
}

// Inserts the cells of another index into this one, which is empty.
void SlotTable::refill_from(const Region& index, std::size_t buckets) noexcept {
  const std::size_t cell_bytes = lines_.layout->cells * sizeof(std::uint64_t);
  for (std::size_t b = 0; b < buckets; ++b) {
    const std::byte* const line = index.data() + b * kCacheLine;
    for (std::size_t c = 0; c < lines_.layout->cells; ++c) {
      const auto stored = load<std::uint64_t>(line + c * sizeof(std::uint64_t));
      if (stored == 0) {
        break;
      }
      lines_.copy_payload(place_cell(stored | passed_.both),
                          line + cell_bytes + c * lines_.layout->payload_bytes);
    }
  }
}

// Without memory for a second index the slot stays as it is, correct but slow, and the next insert that
// passes kLongestProbe buckets tries again.
void SlotTable::scramble() noexcept {
  Region old;
  try {
    old.resize(lines_.count * kCacheLine);
  } catch (const std::bad_alloc&) {
    return;
  }
  std::swap(old, lines_.memory);
  ++version_;
  lines_.scramble = process_secret();
  refill_from(old, lines_.count);
}

// Moves the cells of the first `old_buckets` buckets to their new homes, from the last bucket to the first,
// so that all that is written has been read: homes only move up. A cell waits until all have been read if its
// new home is full, or comes before the bucket in which it lay (after its old home). Without branches that
// depend on the cells: they could not be predicted, and would take most of the time.
template <std::size_t kPayload>
void SlotTable::spread(std::size_t old_buckets, WaitingCells<kPayload>& waiting) noexcept {
  constexpr std::size_t kCells = kCacheLine / (sizeof(std::uint64_t) + kPayload);
  constexpr std::size_t kPayloads = kCells * sizeof(std::uint64_t);  // where they begin
  using Payload = std::array<std::byte, kPayload>;
  // Copies of members: the stores below cannot alias them.
  const auto [lines, buckets, scrambled] = this->buckets();
  const unsigned slot_bits = lines_.layout->slots.bits();
  const std::uint64_t passed = passed_.both;
  auto* next = waiting.data();
  std::uint8_t* const placed = waiting.placed();
  for (std::size_t b = old_buckets; b-- > 0;) {
    std::array<std::byte, kCacheLine> line;
    std::memcpy(line.data(), lines + b * kCacheLine, kCacheLine);
    std::memset(lines + b * kCacheLine, 0, kCacheLine);
    for (std::size_t c = 0; c < kCells; ++c) {
      const auto stored = load<std::uint64_t>(line.data() + c * sizeof(std::uint64_t));
      const std::size_t to =
          scale(BucketLines::probe_key(stored, scrambled, slot_bits) << slot_bits, buckets);
      std::byte* const there = lines + to * kCacheLine;
      const bool is_early = stored == 0 || to < b;
      const std::size_t n = placed[to];
      const bool is_full = n == kCells;
      placed[to] = static_cast<std::uint8_t>(n + (is_early || is_full ? 0U : 1U));
      const std::uint64_t waits = is_early || is_full ? 1 : 0;
      const std::array<std::byte*, 2> keys{there + n * sizeof stored,
                                           reinterpret_cast<std::byte*>(&next->cell)};
      const std::array<std::byte*, 2> values{there + kPayloads + n * kPayload, next->payload.data()};
      store(keys[waits], stored | passed);
      store(values[waits], load<Payload>(line.data() + kPayloads + c * kPayload));
      next += waits & static_cast<std::uint64_t>(stored != 0);
    }
  }
  waiting.set_end(next);
  for (const auto& waiting_cell : waiting.cells()) {
    store(place_cell(waiting_cell.cell), waiting_cell.payload);
  }
}

}  // namespace shoal
