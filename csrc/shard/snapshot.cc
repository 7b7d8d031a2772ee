#include "shard/snapshot.h"

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <utility>

namespace shoal {

// --- the shard's part -------------------------------------------------------------------------------------------

void Shard::keep(Guarded& slot, std::span<const std::uint64_t> hashes) noexcept {
  for (const Guarded::Since& since : slot.changed) {
    if (since.now != nullptr) {
      since.now->add(hashes, slot.table.size());
    }
  }
  slot.door_changed |= slot.door != nullptr && slot.since(Purpose::kSave).now != nullptr;
  if (slot.undo == nullptr || saving_.lost.load(std::memory_order_relaxed)) {
    return;
  }
  try {
    slot.undo->keep_from(slot.table, hashes);
    if (slot.door != nullptr) {
      std::vector<std::byte*> rows(hashes.size());
      slot.table.find(hashes, rows);
      std::vector<std::uint64_t> waiting;
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (rows[i] == nullptr) {
          waiting.push_back(hashes[i]);
        }
      }
      slot.door->keep(waiting);
    }
  } catch (const std::bad_alloc&) {
    saving_.lost = true;
  }
  const std::size_t kept = slot.undo->bytes() + (slot.door == nullptr ? 0 : slot.door->kept_bytes());
  saving_.kept += kept - std::exchange(slot.kept, kept);
}

void Shard::before_change_of_all(Guarded& slot) noexcept {
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
  // Of a change that concerns all slots, the part in those that are marked; half of the room is enough for any.
  const std::size_t piece = rows_.bytes() + 2 * sizeof(std::uint64_t);
  const std::size_t needed = rows * piece / slots_.count() * saving_.left.load();
  return !is_saving() ||
         saving_.kept.load() + std::min(needed, saving_.most.load() / 2) <= saving_.most.load();
}

void Shard::wait_for_slots(std::size_t rows) {
  const auto fits = [&] { return fits_save(rows); };
  if (fits()) {
    return;
  }
  const bool waits =
      of_all_ == nullptr;  // whoever has one lock for all slots must not keep it: it waits outside
  std::unique_lock lock(saving_.mutex);
  if (!(waits && saving_.taken.wait_for(lock, Snapshot::kPatience, fits)) &&
      saving_.kept.load() > Snapshot::kHopeless * saving_.most.load()) {
    saving_.lost = true;
  }
}

std::string Shard::base(Purpose purpose) const {
  const std::lock_guard lock(saving_.mutex);
  return saving_.bases[static_cast<std::size_t>(purpose)];
}

void Shard::track(std::string base) {
  check_process();
  for (const auto& slot : tables_) {
    const std::unique_lock lock(slot->lock);
    slot->since(Purpose::kSave).now = std::make_unique<Changed>(slots_);
    slot->door_changed = false;
    slot->watched = true;
  }
  const std::lock_guard lock(saving_.mutex);
  saving_.bases[static_cast<std::size_t>(Purpose::kSave)] = std::move(base);
}

// --- the snapshot -----------------------------------------------------------------------------------------------

struct Snapshot::Copy {
  explicit Copy(const Shard& shard) : rows(shard.layout_, Slot{0}), door(shard.doors_) {}

  // Instead of all rows: those of the ranges.
  void pick(const SlotTable& table, const Changed& ranges, std::size_t row_bytes) {
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
  DoorCopy door;
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte> bytes;
};

Snapshot::Snapshot(Shard& shard, std::uint32_t store_clock, Kind kind, std::size_t most, Purpose purpose)
    : shard_(shard),
      step_(shard.step()),
      clock_(shard.table_clock(store_clock)),
      kind_(kind),
      purpose_(purpose) {
  shard.check_process();
  SHOAL_CHECK(!shard.saving_.active.load(), "this table is being saved already: one save at a time");
  const std::size_t slots = shard.slots_.count();
  SHOAL_CHECK(kind != Kind::kDelta || !shard.base(purpose).empty(),
              "nobody knows what has changed: save all rows first, and have changes tracked");
  std::vector<std::unique_ptr<Undo>> undos(slots);  // all memory first
  std::vector<std::unique_ptr<Changed>> changed(slots);
  for (std::size_t s = 0; s < slots && kind != Kind::kPlain; ++s) {
    changed[s] = std::make_unique<Changed>(shard.slots_);
  }
  for (std::size_t s = 0; s < slots; ++s) {
    undos[s] =
        std::make_unique<Undo>(shard.numbers_, Slot{static_cast<std::uint32_t>(s)}, shard.rows_.bytes());
  }
  try {
    for (std::size_t s = 0; s < slots && !shard.doors_.admits_all(); ++s) {
      shard.tables_[s]->door->mark(shard.numbers_);
    }
  } catch (...) {
    for (const auto& slot : shard.tables_) {
      slot->door->release();
    }
    throw;
  }
  for (std::size_t s = 0; s < slots; ++s) {
    Guarded& slot = *shard.tables_[s];
    rows_ += slot.table.size();
    bytes_ += shard.bytes_of(slot);
    slot.undo = std::move(undos[s]);
    slot.watched = true;
    if (kind != Kind::kPlain) {
      Guarded::Since& since = slot.since(purpose);
      since.then = std::exchange(since.now, std::move(changed[s]));
      if (purpose == Purpose::kSave) {
        slot.door_changed_then = std::exchange(slot.door_changed, false);
      }
    }
  }
  shard.saving_.most = most != 0 ? most : std::max(kLeast, bytes_ / kShare);
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
    slot->undo.reset();
    slot->kept = 0;
    if (kind_ != Kind::kPlain) {
      Guarded::Since& since = slot->since(purpose_);
      if (!done_) {  // the base is the one before, or none
        if (since.then != nullptr) {
          since.then->add(*since.now);
        }
        since.now = std::move(since.then);
        slot->door_changed |= purpose_ == Purpose::kSave && slot->door_changed_then;
      }
      since.then.reset();
    }
    slot->watched = slot->is_followed();
    if (slot->door != nullptr) {
      slot->door->release();
    }
  }
  {
    const std::lock_guard lock(shard_.saving_.mutex);
    shard_.saving_.active = false;
    shard_.saving_.kept = 0;
  }
  shard_.saving_.taken.notify_all();
}

std::unique_ptr<Snapshot::Copy> Snapshot::borrow() {
  const std::lock_guard lock(mutex_);
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
  SHOAL_CHECK(index_of(number) < shard_.slots_.count(),
              "there is no slot " + std::to_string(index_of(number)));
  Guarded& slot = *shard_.tables_[index_of(number)];
  const Changed* const changed = changed_of(number);
  const std::size_t ranges = changed == nullptr ? 0 : changed->count();
  const bool has_door = slot.door != nullptr && purpose_ == Purpose::kSave;
  const bool all_same = changed != nullptr && ranges == 0 && !(has_door && slot.door_changed_then);
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
  while (taken.undo == nullptr) {
    copy->rows.make_image_room(
        bytes);  // fresh pages take longer than what is copied there: not under the lock
    // Of the readers' kind: rows may be read meanwhile. What is unmarked here only those look at who have all of the lock.
    const std::shared_lock lock(slot.lock);
    SHOAL_CHECK(open_ && slot.undo != nullptr,
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
    if (has_door && !all_same) {
      slot.door->copy_to(copy->door);
    } else if (slot.door != nullptr) {
      slot.door->release();
    }
    taken.kept = std::exchange(slot.kept, 0);
    taken.undo = std::move(slot.undo);
    slot.watched = slot.is_followed();
    shard_.saving_.left.fetch_sub(1);
  }
  check_whole();
  if (has_door && copy->door.lost()) {
    shard_.saving_.lost = true;
    check_whole();
  }
  return taken;
}

void Snapshot::give_back(Taken taken) {
  taken.undo.reset();
  {
    const std::lock_guard lock(shard_.saving_.mutex);
    shard_.saving_.kept.fetch_sub(taken.kept);
  }
  shard_.saving_.taken.notify_all();
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(taken.copy));
}

const Changed* Snapshot::changed_of(Slot slot) const {
  return kind_ == Kind::kDelta ? shard_.tables_[index_of(slot)]->since(purpose_).then.get() : nullptr;
}

std::vector<SlotTable::Entry> Snapshot::rows_of(const Taken& taken, const Changed* changed) const {
  auto rows = taken.undo->laid_over(taken.is_picked ? taken.copy->picked(shard_.rows_.bytes())
                                                    : taken.copy->rows.entries());
  if (changed != nullptr) {
    std::erase_if(rows, [&](const SlotTable::Entry& row) { return !changed->has(row.hash); });
  }
  return rows;
}

Snapshot::Ranges Snapshot::ranges_of(const Changed& changed) {
  Ranges ranges{.bits = changed.bits(), .count = changed.count(), .bytes = {}};
  changed.save(ranges.bytes);
  return ranges;
}

Snapshot::Piece Snapshot::take(Slot number) {
  SHOAL_CHECK(purpose_ == Purpose::kSave, "a snapshot for an export has no sections");
  Taken taken = unmark(number);
  const Guarded& slot = *shard_.tables_[index_of(number)];
  const Changed* const changed = changed_of(number);
  Piece piece;
  piece.has_filter = slot.door != nullptr && (changed == nullptr || slot.door_changed_then);
  if (taken.is_changed) {
    piece.rows = shard_.write_section(rows_of(taken, changed), piece.section);
    if (changed != nullptr) {
      piece.ranges = ranges_of(*changed);
    }
  }
  if (piece.has_filter) {
    taken.copy->door.save(piece.filter);
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

Snapshot::Ranges Snapshot::read_changes(Slot number, std::vector<std::uint64_t>& hashes,
                                        std::vector<float>& weights) {
  SHOAL_CHECK(kind_ == Kind::kDelta, "a snapshot of all rows does not tell what has changed");
  hashes.clear();
  weights.clear();
  Taken taken = unmark(number);
  Ranges ranges;
  if (taken.is_changed) {
    const Changed& changed = *changed_of(number);
    shard_.read_entries(rows_of(taken, &changed), hashes, weights);
    ranges = ranges_of(changed);
  }
  give_back(std::move(taken));
  return ranges;
}

void Snapshot::done(std::string name) {
  if (kind_ != Kind::kPlain) {
    const std::lock_guard lock(shard_.saving_.mutex);
    shard_.saving_.bases[static_cast<std::size_t>(purpose_)] = std::move(name);
    done_ = true;
  }
}

}  // namespace shoal
