// Reading and writing the rows of a slot as columns, for checkpoints (docs/checkpoint-format.md), and their digest.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "shard/shard.h"

namespace shoal {

namespace {

std::size_t aligned(std::size_t n) noexcept {
  return (n + Shard::kSectionAlignment - 1) / Shard::kSectionAlignment * Shard::kSectionAlignment;
}

}  // namespace

std::vector<std::size_t> Shard::section_offsets(std::size_t rows) const {
  std::vector<std::size_t> offsets{0};
  std::size_t end = rows * sizeof(std::uint64_t);
  for (std::size_t k = 0; k < rows_.stored(); ++k) {
    offsets.push_back(aligned(end));
    end = offsets.back() + rows * rows_.width(k);
  }
  offsets.push_back(aligned(end));
  return offsets;
}

std::size_t Shard::section(Slot slot, std::vector<std::byte>& bytes) const {
  check_process();
  const SlotState& state = at(slot);
  std::size_t rows = 0;
  with_slots(index_of(slot), index_of(slot) + 1, false, [&](std::size_t, std::size_t) {
    const std::shared_lock lock(state.lock);
    rows = write_section(state.table.entries(), bytes);
    return true;
  });
  return rows;
}

std::size_t Shard::write_section(std::span<const SlotTable::Entry> entries,
                                 std::vector<std::byte>& bytes) const {
  const auto offsets = section_offsets(entries.size());
  bytes.assign(offsets.back(), std::byte{0});
  for (std::size_t r = 0; r < entries.size(); ++r) {
    std::memcpy(bytes.data() + r * sizeof(std::uint64_t), &entries[r].hash, sizeof(std::uint64_t));
  }
  for (std::size_t k = 0; k + 2 < offsets.size(); ++k) {
    const std::size_t width = rows_.width(k);
    const std::size_t from = rows_.offset(k);
    std::byte* const to = bytes.data() + offsets[k + 1];
    const auto copy = [&](auto bytes_each) {
      for (std::size_t r = 0; r < entries.size(); ++r) {
        std::memcpy(to + r * bytes_each, entries[r].row + from, bytes_each);
      }
    };
    if (width == sizeof(float)) {
      copy(std::integral_constant<std::size_t, sizeof(float)>{});  // a load and a store, no call
    } else {
      copy(width);
    }
  }
  return entries.size();
}

std::vector<std::uint64_t> Shard::hashes_of(std::size_t rows, std::span<const std::byte> section) const {
  // Checked first: the product of a count that is too large could overflow.
  SHOAL_CHECK(
      rows <= section.size() / sizeof(std::uint64_t) && section.size() == section_offsets(rows).back(),
      "a section of " + std::to_string(section.size()) + " bytes does not hold " + std::to_string(rows) +
          " rows of this table");
  std::vector<std::uint64_t> hashes(rows);
  if (rows != 0) {
    std::memcpy(hashes.data(), section.data(), rows * sizeof(std::uint64_t));
  }
  SHOAL_CHECK(std::adjacent_find(hashes.begin(), hashes.end(), std::greater_equal<>()) == hashes.end(),
              "the hashes of a section must ascend");
  return hashes;
}

std::size_t Shard::merge(std::size_t base_rows, std::span<const std::byte> base, std::size_t delta_rows,
                         std::span<const std::byte> delta, const DirtyRanges& ranges,
                         std::vector<std::byte>& merged) const {
  const auto old = hashes_of(base_rows, base);
  const auto fresh = hashes_of(delta_rows, delta);
  SHOAL_CHECK(std::ranges::all_of(fresh, [&](std::uint64_t hash) { return ranges.has(hash); }),
              "a delta has a row that lies in none of its ranges");
  struct Row {
    bool is_fresh;
    std::size_t number;
  };
  std::vector<Row> rows;
  rows.reserve(old.size() + fresh.size());
  for (std::size_t i = 0, j = 0; i < old.size() || j < fresh.size();) {
    if (j == fresh.size() || (i < old.size() && old[i] <= fresh[j])) {
      if (!ranges.has(old[i])) {
        rows.push_back({false, i});
      }
      ++i;
    } else {
      rows.push_back({true, j++});
    }
  }
  const auto offsets = section_offsets(rows.size());
  const auto old_offsets = section_offsets(old.size());
  const auto fresh_offsets = section_offsets(fresh.size());
  merged.assign(offsets.back(), std::byte{0});
  for (std::size_t k = 0; k + 1 < offsets.size(); ++k) {
    const std::size_t width = k == 0 ? sizeof(std::uint64_t) : rows_.width(k - 1);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto& [is_fresh, number] = rows[r];
      const std::byte* const from = is_fresh ? delta.data() + fresh_offsets[k] : base.data() + old_offsets[k];
      std::memcpy(merged.data() + offsets[k] + r * width, from + number * width, width);
    }
  }
  return rows.size();
}

std::size_t Shard::restore(std::size_t rows, std::span<const std::byte> section, std::size_t first_slot,
                           std::size_t end_slot) {
  check_process();
  const auto hashes = hashes_of(rows, section);
  const auto offsets = section_offsets(rows);
  const auto row_of = [&](std::size_t bound) {  // the first row of that slot or a later one
    return static_cast<std::size_t>(
        std::ranges::partition_point(hashes,
                                     [&](std::uint64_t hash) { return index_of(slots_.of(hash)) < bound; }) -
        hashes.begin());
  };
  const std::size_t begin = row_of(std::max(first_slot, first_));
  const std::size_t end = std::max(begin, row_of(std::min(end_slot, this->end_slot())));
  std::vector<std::uint64_t> slot_offsets;  // for the source
  for (std::size_t first = begin; first < end;) {
    const std::size_t slot = slot_position(hashes[first]);
    const std::size_t last = static_cast<std::size_t>(
        std::partition_point(hashes.begin() + static_cast<std::ptrdiff_t>(first), hashes.end(),
                             [&](std::uint64_t hash) { return slot_position(hash) == slot; }) -
        hashes.begin());
    const auto added = std::span(hashes).subspan(first, last - first);
    if (source_ != nullptr) {
      slot_offsets.assign(slot + 1, 0);
      slot_offsets.resize(tables_.size() + 1, added.size());
    }
    RowLocations* locations = nullptr;
    const Writing writing = begin_writing({added, slot_offsets}, locations, RowSource::Use::kCreates);
    const std::unique_lock lock(tables_[slot]->lock);
    SlotTable& table = tables_[slot]->table;
    before_change(*tables_[slot], added);
    if (table.size() != 0) {
      std::vector<std::byte*> there(added.size());
      table.find(added, there);
      SHOAL_CHECK(std::count(there.begin(), there.end(), nullptr) == std::ssize(there),
                  "a key of the section is in the table already: restore into an empty table");
    }
    if (!table.has_room(added.size())) {
      if (budget_ != nullptr &&
          bytes_of(*tables_[slot]) - table.bytes() + table.bytes_with(added.size(), true) > allowed(slot)) {
        throw_over_budget(slot, added.size());
      }
      table.reserve(table.size() + added.size());
      note(slot);
    }
    for (std::size_t r = first; r < last; ++r) {
      std::byte* const row = table.insert(hashes[r]);
      for (std::size_t k = 0; k + 2 < offsets.size(); ++k) {
        const std::size_t width = rows_.width(k);
        std::memcpy(row + rows_.offset(k), section.data() + offsets[k + 1] + r * width, width);
      }
    }
    first = last;
  }
  return end - begin;
}

void Shard::filter(Slot slot, std::vector<std::byte>& bytes) const {
  check_process();
  bytes.clear();
  const SlotState& state = at(slot);
  const std::shared_lock lock(state.lock);
  if (state.filter != nullptr) {
    state.filter->save(bytes);
  }
}

void Shard::restore_filter(Slots cut, Slot slot, std::span<const std::byte> bytes, std::size_t first_slot,
                           std::size_t end_slot) {
  check_process();
  SHOAL_CHECK(index_of(slot) < cut.count(), "there is no slot " + std::to_string(index_of(slot)));
  SHOAL_CHECK(bytes.empty() || !admission_.admits_all(),
              "this table has no admission rule that remembers keys");
  const auto writing = enter();
  SHOAL_CHECK(!saving_.active.load(), "this table is being saved: restore into one of its own");
  const auto budget_lock = lock_budget();
  // The slots that overlap it: several if `cut` is coarser, the one that contains it if `cut` is finer.
  const std::size_t first = (std::size_t{index_of(slot)} << slots_.bits()) >> cut.bits();
  const std::size_t end =
      std::max(first + 1, ((std::size_t{index_of(slot)} + 1) << slots_.bits()) >> cut.bits());
  for (std::size_t s = std::max({first, first_slot, first_});
       s < std::min({end, end_slot, this->end_slot()}) && !bytes.empty(); ++s) {
    const std::size_t place = s - first_;
    SlotState& state = *tables_[place];
    const std::unique_lock lock(state.lock);
    if (budget_ != nullptr && bytes_of(state) + bytes.size() > allowed(place)) {
      throw_over_budget(place, 0);
    }
    state.filter->restore(cut, slot, bytes);
    note(place);
  }
}

void Shard::reserve(Slots cut, std::span<const std::size_t> rows) {
  check_process();
  SHOAL_CHECK(rows.size() == cut.count(), "reserve takes one number of rows a slot");
  if (cut.bits() < slots_.bits() || source_ != nullptr) {
    return;  // rows of a coarser slot can only be assigned by their hashes
  }
  const auto writing = enter();
  const auto budget_lock = lock_budget();
  const std::size_t together = cut.count() / slots_.count();
  const auto total_of = [&](std::size_t place) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>((first_ + place) * together);
    return std::accumulate(first, first + static_cast<std::ptrdiff_t>(together), std::size_t{0});
  };
  for (std::size_t s = 0; budget_ != nullptr && s < tables_.size(); ++s) {
    const std::unique_lock lock(tables_[s]->lock);
    const SlotTable& table = tables_[s]->table;
    const std::size_t more = total_of(s) - std::min(total_of(s), table.size());
    if (bytes_of(*tables_[s]) - table.bytes() + table.bytes_with(more, true) > allowed(s)) {
      throw_over_budget(s, more);
    }
  }
  pool_.run(tables_.size(), [&](std::size_t s) {
    const std::unique_lock lock(tables_[s]->lock);
    tables_[s]->table.reserve(total_of(s));
    note(s);
  });
}

std::array<std::uint64_t, 2> Shard::digest(Slot slot) const {
  check_process();
  std::array<std::uint64_t, 2> sums{};
  const SlotState& state = at(slot);
  const std::shared_lock lock(state.lock);
  state.table.each_row([&](std::uint64_t hash, const std::byte* row) {
    std::uint64_t first = mix(hash);
    std::uint64_t second = mix(~hash);
    for (std::size_t k = 0; k < rows_.stored(); ++k) {  // column by column: padding is not hashed
      for (std::size_t at = 0; at < rows_.width(k); at += sizeof(std::uint32_t)) {
        std::uint32_t word = 0;
        std::memcpy(&word, row + rows_.offset(k) + at, std::min(sizeof word, rows_.width(k) - at));
        first = mix(first ^ word);
        second = mix(second ^ word);
      }
    }
    sums[0] += first;
    sums[1] += second;
  });
  return sums;
}

}  // namespace shoal
