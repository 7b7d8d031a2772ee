// A change waits for the moment, which ends with the pushes in progress, and for the copy of a slot; never for a
// disk. When the logged contents reach `most` bytes, changes wait until slots are taken, each up to kPatience (those
// of a data loop are repeated by their senders instead, endpoint/writes.cc); at kHopeless times that, or without
// memory, the save fails, not the change.
//
// Deltas. A save may be the base of the next: from its moment on each slot records the ranges of its hashes that
// changed (table/dirty_ranges.h). The next save may contain only these ranges, with all rows that they hold at its
// moment. A save that does not complete changes nothing: earlier changes remain recorded. Exports have ranges of
// their own. If few ranges of a slot changed, only the rows in them are copied and no others are read.

#include "shard/snapshot.h"

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <utility>

namespace shoal {

// --- the shard's part -------------------------------------------------------------------------------------------

void Shard::keep(SlotState& slot, std::span<const std::uint64_t> hashes) noexcept {
  for (const SlotState::Since& since : slot.changed) {
    if (since.now != nullptr) {
      since.now->add(hashes, slot.table.size());
    }
  }
  slot.filter_changed |= slot.filter != nullptr && slot.since(Purpose::kSave).now != nullptr;
  if (slot.pre_images == nullptr || saving_.lost.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    slot.pre_images->keep_from(slot.table, hashes);
    if (slot.filter != nullptr) {
      std::vector<std::byte*> rows(hashes.size());
      slot.table.find(hashes, rows);
      std::vector<std::uint64_t> waiting;
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (rows[i] == nullptr) {
          waiting.push_back(hashes[i]);
        }
      }
      slot.filter->keep(waiting);
    }
  } catch (const std::bad_alloc&) {
    saving_.lost = true;
  }
  const std::size_t kept =
      slot.pre_images->bytes() + (slot.filter == nullptr ? 0 : slot.filter->kept_bytes());
  saving_.kept += kept - std::exchange(slot.kept, kept);
}

void Shard::before_change_of_all(SlotState& slot) noexcept {
  if (!slot.watched) [[likely]] {
    return;
  }
  std::array<std::uint64_t, 1024> hashes;
  std::size_t count = 0;
  const auto flush = [&] { keep(slot, std::span(hashes).first(std::exchange(count, 0))); };
  slot.table.each_row([&](std::uint64_t hash, const std::byte*) {
    hashes[count] = hash;
    if (++count == hashes.size()) {
      flush();
    }
  });
  flush();
}

bool Shard::fits_save(std::size_t rows) const noexcept {
  // For a change of all slots, counts the part in marked slots; half of the room suffices for any.
  const std::size_t piece = rows_.bytes() + 2 * sizeof(std::uint64_t);
  const std::size_t needed = rows * piece / tables_.size() * saving_.left.load();
  return !is_saving() ||
         saving_.kept.load() + std::min(needed, saving_.most.load() / 2) <= saving_.most.load();
}

void Shard::wait_for_slots(std::size_t rows) const {
  const auto fits = [&] { return fits_save(rows); };
  if (fits()) {
    return;
  }
  const bool may_wait = of_all_ == nullptr;  // a holder of the one lock must not wait here
  const auto end = std::chrono::steady_clock::now() + Snapshot::kPatience;
  const MutexLock lock(saving_.mutex);
  while (may_wait && !fits() && std::chrono::steady_clock::now() < end) {
    saving_.slot_saved.wait_until(saving_.mutex, end);
  }
  if (!(may_wait && fits()) && saving_.kept.load() > Snapshot::kHopeless * saving_.most.load()) {
    saving_.lost = true;
  }
}

std::string Shard::base(Purpose purpose) const {
  const MutexLock lock(saving_.mutex);
  return saving_.bases[static_cast<std::size_t>(purpose)];
}

void Shard::track(std::string base) {
  check_process();
  for (const auto& slot : tables_) {
    const std::unique_lock lock(slot->lock);
    slot->since(Purpose::kSave).now = std::make_unique<DirtyRanges>(slots_);
    slot->filter_changed = false;
    slot->watched = true;
  }
  const MutexLock lock(saving_.mutex);
  saving_.bases[static_cast<std::size_t>(Purpose::kSave)] = std::move(base);
}

std::vector<std::unique_ptr<DirtyRanges>> Shard::new_ranges() const {
  std::vector<std::unique_ptr<DirtyRanges>> ranges(tables_.size());
  for (auto& one : ranges) {
    one = std::make_unique<DirtyRanges>(slots_);
  }
  return ranges;
}

void Shard::begin_base(Purpose purpose, std::vector<std::unique_ptr<DirtyRanges>> ranges) noexcept {
  for (std::size_t s = 0; s < tables_.size(); ++s) {
    SlotState& slot = *tables_[s];
    const std::unique_lock lock(slot.lock);
    SlotState::Since& since = slot.since(purpose);
    since.then = std::exchange(since.now, std::move(ranges[s]));
    if (purpose == Purpose::kSave) {
      slot.filter_changed_then = std::exchange(slot.filter_changed, false);
    }
    slot.watched = true;
  }
}

void Shard::end_base(SlotState& slot, Purpose purpose, bool is_base) noexcept {
  SlotState::Since& since = slot.since(purpose);
  if (!is_base) {  // the base is the one before, or none
    if (since.then != nullptr) {
      since.then->add(*since.now);
    }
    since.now = std::move(since.then);
    if (purpose == Purpose::kSave) {  // without a base nothing has changed since it
      slot.filter_changed = since.now != nullptr && (slot.filter_changed || slot.filter_changed_then);
    }
  }
  since.then.reset();
  slot.watched = slot.pre_images != nullptr || slot.is_followed();
}

void Shard::begin_base() { begin_base(Purpose::kSave, new_ranges()); }

void Shard::end_base(std::optional<std::string> name) {
  for (const auto& slot : tables_) {
    const std::unique_lock lock(slot->lock);
    end_base(*slot, Purpose::kSave, name.has_value());
  }
  if (name) {
    const MutexLock lock(saving_.mutex);
    saving_.bases[static_cast<std::size_t>(Purpose::kSave)] = std::move(*name);
  }
}

void Shard::forget_base() {
  const MutexLock lock(saving_.mutex);
  saving_.bases[static_cast<std::size_t>(Purpose::kSave)].clear();
}

// --- the snapshot -----------------------------------------------------------------------------------------------

struct Snapshot::Copy {
  explicit Copy(const Shard& shard) : rows(shard.layout_, Slot{0}), filter(shard.admission_) {}

  // Copies the rows in the ranges instead of all rows.
  void pick(const SlotTable& table, const DirtyRanges& ranges, std::size_t row_bytes) {
    hashes.clear();
    bytes.clear();
    table.each_row_in(ranges, [&](std::uint64_t hash, const std::byte* row) {
      hashes.push_back(hash);
      bytes.insert(bytes.end(), row, row + row_bytes);
    });
  }
  // In ascending order of hash.
  std::vector<SlotTable::Entry> picked(std::size_t row_bytes) const {
    std::vector<SlotTable::Entry> all(hashes.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = {hashes[i], bytes.data() + i * row_bytes};
    }
    std::ranges::sort(all, {}, &SlotTable::Entry::hash);
    return all;
  }

  SlotTable rows;
  AdmissionSnapshot filter;
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte> bytes;
};

Snapshot::Snapshot(Shard& shard, std::uint32_t store_clock, Kind kind, std::size_t most, Purpose purpose,
                   std::size_t parts)
    : shard_(shard),
      step_(shard.step()),
      clock_(shard.table_clock(store_clock)),
      kind_(kind),
      purpose_(purpose) {
  shard.check_process();
  SHOAL_CHECK(!shard.saving_.active.load(), "this table is being saved already: one save at a time");
  const std::size_t slots = shard.tables_.size();
  SHOAL_CHECK(kind != Kind::kDelta || !shard.base(purpose).empty(),
              "changes since the last save are unknown: save all rows first, and have changes tracked");
  std::vector<std::unique_ptr<PreImageLog>> logs(slots);  // allocate everything first
  std::vector<std::unique_ptr<DirtyRanges>> changed;
  if (kind != Kind::kPlain) {
    changed = shard.new_ranges();
  }
  for (std::size_t s = 0; s < slots; ++s) {
    logs[s] = std::make_unique<PreImageLog>(
        shard.numbers_, Slot{static_cast<std::uint32_t>(shard.first_ + s)}, shard.rows_.bytes());
  }
  try {
    for (std::size_t s = 0; s < slots && !shard.admission_.admits_all(); ++s) {
      shard.tables_[s]->filter->mark(shard.numbers_);
    }
  } catch (...) {
    for (const auto& slot : shard.tables_) {
      slot->filter->release();
    }
    throw;
  }
  const Shard::RowBytes all = shard.rows_and_bytes();
  rows_ = all.rows;
  bytes_ = all.bytes;
  for (std::size_t s = 0; s < slots; ++s) {
    SlotState& slot = *shard.tables_[s];
    slot.pre_images = std::move(logs[s]);
    slot.watched = true;
  }
  if (kind != Kind::kPlain) {
    shard.begin_base(purpose, std::move(changed));
  }
  shard.saving_.most = most != 0 ? most : std::max(kMin / parts, bytes_ / kShare);
  shard.saving_.kept = 0;
  shard.saving_.lost = false;
  shard.saving_.left = slots;
  shard.saving_.active = true;
}

Snapshot::~Snapshot() { close(); }

void Snapshot::close() noexcept {
  if (!std::exchange(open_, false) || shard_.stamp_ != process_stamp()) {
    return;
  }
  for (const auto& slot : shard_.tables_) {
    const std::unique_lock lock(slot->lock);
    slot->pre_images.reset();
    slot->kept = 0;
    if (kind_ != Kind::kPlain) {
      Shard::end_base(*slot, purpose_, done_);
    }
    slot->watched = slot->is_followed();
    if (slot->filter != nullptr) {
      slot->filter->release();
    }
  }
  {
    const MutexLock lock(shard_.saving_.mutex);
    shard_.saving_.active = false;
    shard_.saving_.kept = 0;
  }
  shard_.saving_.slot_saved.notify_all();
}

std::unique_ptr<Snapshot::Copy> Snapshot::borrow() {
  const MutexLock lock(mutex_);
  if (idle_.empty()) {
    return std::make_unique<Copy>(shard_);
  }
  auto copy = std::move(idle_.back());
  idle_.pop_back();
  return copy;
}

void Snapshot::check_whole() const {
  if (shard_.saving_.lost.load()) {
    throw SnapshotLostError(
        "the save was given up: rows changed faster than they were written, and to keep " +
        std::to_string(shard_.saving_.kept.load()) +
        " bytes of rows as they were took too much memory; save to a faster disk, or while less is pushed");
  }
}

Snapshot::Taken Snapshot::unmark(Slot number) {
  shard_.check_process();
  Taken taken;
  const std::size_t slot = index_of(number);
  shard_.with_slots(slot, slot + 1, false, [&](std::size_t, std::size_t) {
    taken = unmark_resident(number);
    return true;
  });
  return taken;
}

Snapshot::Taken Snapshot::unmark_resident(Slot number) {
  SlotState& slot = shard_.at(number);
  const DirtyRanges* const changed = changed_of(number);
  const std::size_t ranges = changed == nullptr ? 0 : changed->count();
  const bool has_filter = slot.filter != nullptr && purpose_ == Purpose::kSave;
  const bool all_same = changed != nullptr && ranges == 0 && !(has_filter && slot.filter_changed_then);
  Taken taken;
  taken.copy = borrow();
  taken.is_changed = !all_same;
  Copy* const copy = taken.copy.get();
  taken.is_picked = changed != nullptr && ranges < (std::size_t{1} << changed->bits()) / kFew;
  if (taken.is_picked) {
    copy->hashes.reserve(kNear * ranges);
    copy->bytes.reserve(kNear * ranges * shard_.rows_.bytes());
  }
  SlotTable::ImageBytes bytes{};
  while (taken.pre_images == nullptr) {
    copy->rows.make_image_room(
        bytes);  // fresh pages take longer than what is copied there: not under the lock
    // A shared lock: rows may be read meanwhile. What is unmarked here is only read under the exclusive lock.
    const std::shared_lock lock(slot.lock);
    SHOAL_CHECK(open_ && slot.pre_images != nullptr,
                "slot " + std::to_string(index_of(number)) + " of the snapshot was taken already");
    if (taken.is_picked) {
      copy->pick(slot.table, *changed, shard_.rows_.bytes());
    } else if (!all_same) {
      bytes = slot.table.image_bytes();
      if (!copy->rows.has_image_room(bytes)) {
        continue;
      }
      copy->rows.become_image_of(slot.table);
    }
    if (has_filter && !all_same) {
      slot.filter->copy_to(copy->filter);
    } else if (slot.filter != nullptr) {
      slot.filter->release();
    }
    taken.kept = std::exchange(slot.kept, 0);
    taken.pre_images = std::move(slot.pre_images);
    slot.watched = slot.is_followed();
    shard_.saving_.left.fetch_sub(1);
  }
  check_whole();
  if (has_filter && copy->filter.lost()) {
    shard_.saving_.lost = true;
    check_whole();
  }
  return taken;
}

void Snapshot::give_back(Taken taken) {
  taken.pre_images.reset();
  {
    const MutexLock lock(shard_.saving_.mutex);
    shard_.saving_.kept.fetch_sub(taken.kept);
  }
  shard_.saving_.slot_saved.notify_all();
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(taken.copy));
}

const DirtyRanges* Snapshot::changed_of(Slot slot) const {
  return kind_ == Kind::kDelta ? shard_.at(slot).since(purpose_).then.get() : nullptr;
}

std::vector<SlotTable::Entry> Snapshot::rows_of(const Taken& taken, const DirtyRanges* changed) const {
  auto rows = taken.pre_images->laid_over(taken.is_picked ? taken.copy->picked(shard_.rows_.bytes())
                                                          : taken.copy->rows.entries());
  if (changed != nullptr) {
    std::erase_if(rows, [&](const SlotTable::Entry& row) { return !changed->has(row.hash); });
  }
  return rows;
}

Snapshot::Ranges Snapshot::ranges_of(const DirtyRanges& changed) {
  Ranges ranges{.bits = changed.bits(), .count = changed.count(), .bytes = {}};
  changed.save(ranges.bytes);
  return ranges;
}

Snapshot::Piece Snapshot::take(Slot number) {
  SHOAL_CHECK(purpose_ == Purpose::kSave, "a snapshot for an export has no sections");
  Taken taken = unmark(number);
  const SlotState& slot = shard_.at(number);
  const DirtyRanges* const changed = changed_of(number);
  Piece piece;
  piece.has_filter = slot.filter != nullptr && (changed == nullptr || slot.filter_changed_then);
  if (taken.is_changed) {
    piece.rows = shard_.write_section(rows_of(taken, changed), piece.section);
    if (changed != nullptr) {
      piece.ranges = ranges_of(*changed);
    }
  }
  if (piece.has_filter) {
    taken.copy->filter.save(piece.filter);
  }
  give_back(std::move(taken));
  return piece;
}

void Snapshot::read_slot(Slot number, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) {
  SHOAL_CHECK(kind_ != Kind::kDelta, "a snapshot for a delta has not all rows");
  Taken taken = unmark(number);
  shard_.read_entries(rows_of(taken, nullptr), hashes, weights);
  give_back(std::move(taken));
}

void Snapshot::take_state(Slot number, ByteWriter& out) {
  SHOAL_CHECK(kind_ != Kind::kDelta && purpose_ == Purpose::kSave, "a snapshot for a delta has not all rows");
  Taken taken = unmark(number);
  shard_.write_rows(rows_of(taken, nullptr), out);
  if (shard_.at(number).filter != nullptr) {
    taken.copy->filter.save_all(out);
  }
  give_back(std::move(taken));
}

Snapshot::Ranges Snapshot::read_changes(Slot number, std::vector<std::uint64_t>& hashes,
                                        std::vector<float>& weights) {
  SHOAL_CHECK(kind_ == Kind::kDelta, "a snapshot of all rows does not record changes");
  hashes.clear();
  weights.clear();
  Taken taken = unmark(number);
  Ranges ranges;
  if (taken.is_changed) {
    const DirtyRanges& changed = *changed_of(number);
    shard_.read_entries(rows_of(taken, &changed), hashes, weights);
    ranges = ranges_of(changed);
  }
  give_back(std::move(taken));
  return ranges;
}

void Snapshot::done(std::string name) {
  if (kind_ != Kind::kPlain) {
    const MutexLock lock(shard_.saving_.mutex);
    shard_.saving_.bases[static_cast<std::size_t>(purpose_)] = std::move(name);
    done_ = true;
  }
}

}  // namespace shoal
