// Each slot is copied as it is, and then its logged contents are laid over the copy. In a delta
// (shard/change_log.cc), if few ranges of a slot changed, only the rows in them are copied and no others are
// read.

#include "shard/snapshot.h"

#include <algorithm>
#include <shared_mutex>
#include <string>
#include <utility>

#include "shard/section_codec.h"

namespace shoal {

struct Snapshot::Copy {
  explicit Copy(const ShardCore& core) : rows(core.layout, Slot{0}), filter(core.admission) {}

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
    std::vector<SlotTable::Entry> entries(hashes.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      entries[i] = {hashes[i], bytes.data() + i * row_bytes};
    }
    std::ranges::sort(entries, {}, &SlotTable::Entry::hash);
    return entries;
  }

  SlotTable rows;
  AdmissionSnapshot filter;
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte> bytes;
};

Snapshot::Snapshot(Shard& shard, std::uint32_t store_clock, Kind kind, std::size_t limit, Purpose purpose,
                   std::size_t parts)
    : core_(shard.core()),
      step_(shard.step()),
      clock_(shard.table_clock(store_clock)),
      kind_(kind),
      purpose_(purpose) {
  core_.owner.check();
  SHOAL_CHECK(!core_.changes.has_snapshot(), "this table is being saved already: one save at a time");
  SHOAL_CHECK(kind != Kind::kDelta || !core_.changes.base(purpose).empty(),
              "changes since the last save are unknown: save all rows first, and have changes tracked");
  const std::size_t slots = core_.states.size();
  std::vector<std::unique_ptr<PreImageLog>> logs(slots);  // allocate everything first
  std::vector<std::unique_ptr<DirtyRanges>> changed;
  if (kind != Kind::kPlain) {
    changed = core_.changes.new_ranges();
  }
  for (std::size_t s = 0; s < slots; ++s) {
    logs[s] = std::make_unique<PreImageLog>(core_.numbers, Slot{static_cast<std::uint32_t>(core_.first + s)},
                                            core_.rows.bytes());
  }
  try {
    for (std::size_t s = 0; s < slots && !core_.admission.admits_all(); ++s) {
      core_.states[s]->filter->mark(core_.numbers);
    }
  } catch (...) {
    for (const auto& slot : core_.states) {
      slot->filter->release();
    }
    throw;
  }
  const ShardCore::RowBytes total = core_.rows_and_bytes();
  rows_ = total.rows;
  bytes_ = total.bytes;
  for (std::size_t s = 0; s < slots; ++s) {
    SlotState& slot = *core_.states[s];
    slot.pre_images = std::move(logs[s]);
    slot.watched = true;
  }
  if (kind != Kind::kPlain) {
    core_.changes.begin_base(purpose, std::move(changed));
  }
  core_.changes.begin_snapshot(limit != 0 ? limit : std::max(kMin / parts, bytes_ / kShare));
}

Snapshot::~Snapshot() { close(); }

void Snapshot::close() noexcept {
  if (!std::exchange(open_, false) || !core_.owner.is_current()) {
    return;
  }
  for (const auto& slot : core_.states) {
    const std::unique_lock lock(slot->lock);
    slot->pre_images.reset();
    slot->logged = 0;
    if (kind_ != Kind::kPlain) {
      ChangeLog::end_base(*slot, purpose_, done_);
    }
    slot->watched = slot->is_followed();
    if (slot->filter != nullptr) {
      slot->filter->release();
    }
  }
  core_.changes.end_snapshot();
}

std::unique_ptr<Snapshot::Copy> Snapshot::borrow() {
  const MutexLock lock(mutex_);
  if (idle_.empty()) {
    return std::make_unique<Copy>(core_);
  }
  auto copy = std::move(idle_.back());
  idle_.pop_back();
  return copy;
}

void Snapshot::check_whole() const {
  if (core_.changes.is_lost()) {
    throw SnapshotLostError(
        "the save was given up: rows changed faster than they were written, and to keep " +
        std::to_string(core_.changes.logged()) +
        " bytes of rows as they were took too much memory; save to a faster disk, or while less is pushed");
  }
}

Snapshot::Taken Snapshot::unmark(Slot number) {
  core_.owner.check();
  Taken taken;
  const std::size_t slot = index_of(number);
  core_.with_slots(slot, slot + 1, false, [&](std::size_t, std::size_t) {
    taken = unmark_resident(number);
    return true;
  });
  return taken;
}

Snapshot::Taken Snapshot::unmark_resident(Slot number) {
  SlotState& slot = core_.at(number);
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
    copy->bytes.reserve(kNear * ranges * core_.rows.bytes());
  }
  SlotTable::ImageBytes bytes{};
  while (taken.pre_images == nullptr) {
    copy->rows.make_image_room(bytes);  // new pages take longer than what is copied there: not under the lock
    // A shared lock: rows may be read meanwhile. What is unmarked here is only read under the exclusive lock.
    const std::shared_lock lock(slot.lock);
    SHOAL_CHECK(open_ && slot.pre_images != nullptr,
                "slot " + std::to_string(index_of(number)) + " of the snapshot was taken already");
    if (taken.is_picked) {
      copy->pick(slot.table, *changed, core_.rows.bytes());
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
    taken.logged = std::exchange(slot.logged, 0);
    taken.pre_images = std::move(slot.pre_images);
    slot.watched = slot.is_followed();
    core_.changes.slot_taken();
  }
  check_whole();
  if (has_filter && copy->filter.lost()) {
    core_.changes.set_lost();
    check_whole();
  }
  return taken;
}

void Snapshot::give_back(Taken taken) {
  taken.pre_images.reset();
  core_.changes.slot_saved(taken.logged);
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(taken.copy));
}

const DirtyRanges* Snapshot::changed_of(Slot slot) const {
  return kind_ == Kind::kDelta ? core_.at(slot).since(purpose_).then.get() : nullptr;
}

std::vector<SlotTable::Entry> Snapshot::rows_of(const Taken& taken, const DirtyRanges* changed) const {
  auto rows = taken.pre_images->laid_over(taken.is_picked ? taken.copy->picked(core_.rows.bytes())
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
  const SlotState& slot = core_.at(number);
  const DirtyRanges* const changed = changed_of(number);
  Piece piece;
  piece.has_filter = slot.filter != nullptr && (changed == nullptr || slot.filter_changed_then);
  if (taken.is_changed) {
    piece.rows = SectionCodec(core_.rows).write(rows_of(taken, changed), piece.section);
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
  core_.read_entries(rows_of(taken, nullptr), hashes, weights);
  give_back(std::move(taken));
}

void Snapshot::take_state(Slot number, ByteWriter& out) {
  SHOAL_CHECK(kind_ != Kind::kDelta && purpose_ == Purpose::kSave, "a snapshot for a delta has not all rows");
  Taken taken = unmark(number);
  SectionCodec(core_.rows).write_stored(rows_of(taken, nullptr), out);
  if (core_.at(number).filter != nullptr) {
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
    core_.read_entries(rows_of(taken, &changed), hashes, weights);
    ranges = ranges_of(changed);
  }
  give_back(std::move(taken));
  return ranges;
}

void Snapshot::done(std::string name) {
  if (kind_ != Kind::kPlain) {
    core_.changes.set_base(std::move(name), purpose_);
    done_ = true;
  }
}

}  // namespace shoal
