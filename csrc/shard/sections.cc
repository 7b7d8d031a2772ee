// Slots of a Shard as sections, filters, weights and digests, and back from checkpoints.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "shard/section_codec.h"
#include "shard/shard.h"

namespace shoal {

std::size_t Shard::section(Slot slot, std::vector<std::byte>& bytes) const {
  core_.owner.check();
  const SlotState& state = core_.at(slot);
  std::size_t rows = 0;
  core_.with_slots(index_of(slot), index_of(slot) + 1, false, [&](std::size_t, std::size_t) {
    const std::shared_lock lock(state.lock);
    rows = SectionCodec(core_.rows).write(state.table.entries(), bytes);
    return true;
  });
  return rows;
}

std::size_t Shard::restore(std::size_t rows, std::span<const std::byte> section, std::size_t first_slot,
                           std::size_t end_slot) {
  core_.owner.check();
  const SectionCodec codec(core_.rows);
  const auto hashes = codec.hashes(rows, section);
  const auto offsets = codec.offsets(rows);
  const auto row_of = [&](std::size_t bound) {  // the first row of that slot or a later one
    return static_cast<std::size_t>(
        std::ranges::partition_point(
            hashes, [&](std::uint64_t hash) { return index_of(core_.slots.of(hash)) < bound; }) -
        hashes.begin());
  };
  const std::size_t begin = row_of(std::max(first_slot, core_.first));
  const std::size_t end = std::max(begin, row_of(std::min(end_slot, this->end_slot())));
  std::vector<std::uint64_t> slot_offsets;  // for the source
  for (std::size_t first = begin; first < end;) {
    const std::size_t slot = core_.place_of(hashes[first]);
    const std::size_t last = static_cast<std::size_t>(
        std::partition_point(hashes.begin() + static_cast<std::ptrdiff_t>(first), hashes.end(),
                             [&](std::uint64_t hash) { return core_.place_of(hash) == slot; }) -
        hashes.begin());
    const auto added = std::span(hashes).subspan(first, last - first);
    if (core_.source != nullptr) {
      slot_offsets.assign(slot + 1, 0);
      slot_offsets.resize(core_.states.size() + 1, added.size());
    }
    RowLocations* locations = nullptr;
    const ShardCore::Writing writing =
        core_.begin_writing({added, slot_offsets}, locations, RowSource::Use::kCreates);
    const std::unique_lock lock(core_.states[slot]->lock);
    SlotTable& table = core_.states[slot]->table;
    core_.changes.before_change(*core_.states[slot], added);
    if (table.size() != 0) {
      std::vector<std::byte*> found(added.size());
      table.find(added, found);
      SHOAL_CHECK(std::count(found.begin(), found.end(), nullptr) == std::ssize(found),
                  "a key of the section is in the table already: restore into an empty table");
    }
    if (!table.has_room(added.size())) {
      core_.budget.check(slot,
                         core_.states[slot]->bytes() - table.bytes() + table.bytes_with(added.size(), true),
                         added.size());
      table.reserve(table.size() + added.size());
      core_.budget.note(slot);
    }
    for (std::size_t r = first; r < last; ++r) {
      std::byte* const row = table.insert(hashes[r]);
      for (std::size_t k = 0; k + 2 < offsets.size(); ++k) {
        const std::size_t width = core_.rows.width(k);
        std::memcpy(row + core_.rows.offset(k), section.data() + offsets[k + 1] + r * width, width);
      }
    }
    first = last;
  }
  return end - begin;
}

void Shard::filter(Slot slot, std::vector<std::byte>& bytes) const {
  core_.owner.check();
  bytes.clear();
  const SlotState& state = core_.at(slot);
  const std::shared_lock lock(state.lock);
  if (state.filter != nullptr) {
    state.filter->save(bytes);
  }
}

void Shard::restore_filter(Slots cut, Slot slot, std::span<const std::byte> bytes, std::size_t first_slot,
                           std::size_t end_slot) {
  core_.owner.check();
  SHOAL_CHECK(index_of(slot) < cut.count(), "there is no slot " + std::to_string(index_of(slot)));
  SHOAL_CHECK(bytes.empty() || !core_.admission.admits_all(),
              "this table has no admission rule that remembers keys");
  const auto writing = core_.writers.enter();
  SHOAL_CHECK(!core_.changes.has_snapshot(), "this table is being saved: restore into one of its own");
  const auto budget_lock = core_.budget.lock();
  // The slots that overlap it: several if `cut` is coarser, the one that contains it if `cut` is finer.
  const std::size_t first = (std::size_t{index_of(slot)} << core_.slots.bits()) >> cut.bits();
  const std::size_t end =
      std::max(first + 1, ((std::size_t{index_of(slot)} + 1) << core_.slots.bits()) >> cut.bits());
  for (std::size_t s = std::max({first, first_slot, core_.first});
       s < std::min({end, end_slot, this->end_slot()}) && !bytes.empty(); ++s) {
    const std::size_t place = s - core_.first;
    SlotState& state = *core_.states[place];
    const std::unique_lock lock(state.lock);
    core_.budget.check(place, state.bytes() + bytes.size(), 0);
    state.filter->restore(cut, slot, bytes);
    core_.budget.note(place);
  }
}

void Shard::reserve(Slots cut, std::span<const std::size_t> rows) {
  core_.owner.check();
  SHOAL_CHECK(rows.size() == cut.count(), "reserve takes one number of rows a slot");
  if (cut.bits() < core_.slots.bits() || core_.source != nullptr) {
    return;  // rows of a coarser slot can only be assigned by their hashes
  }
  const auto writing = core_.writers.enter();
  const auto budget_lock = core_.budget.lock();
  const std::size_t together = cut.count() / core_.slots.count();
  const auto total_of = [&](std::size_t place) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>((core_.first + place) * together);
    return std::accumulate(first, first + static_cast<std::ptrdiff_t>(together), std::size_t{0});
  };
  for (std::size_t s = 0; core_.budget.is_limited() && s < core_.states.size(); ++s) {
    const std::unique_lock lock(core_.states[s]->lock);
    const SlotTable& table = core_.states[s]->table;
    const std::size_t more = total_of(s) - std::min(total_of(s), table.size());
    core_.budget.check(s, core_.states[s]->bytes() - table.bytes() + table.bytes_with(more, true), more);
  }
  core_.pool.run(core_.states.size(), [&](std::size_t s) {
    const std::unique_lock lock(core_.states[s]->lock);
    core_.states[s]->table.reserve(total_of(s));
    core_.budget.note(s);
  });
}

void Shard::read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const {
  core_.owner.check();
  core_.at(slot);
  core_.with_slots(index_of(slot), index_of(slot) + 1, false, [&](std::size_t, std::size_t) {
    read_slot_in_memory(slot, true, hashes, weights);
    return true;
  });
}

void Shard::read_slot_in_memory(Slot slot, bool is_ordered, std::vector<std::uint64_t>& hashes,
                                std::vector<float>& weights) const {
  core_.owner.check();
  const SlotState& state = core_.at(slot);
  const std::shared_lock lock(state.lock);
  if (is_ordered) {
    return core_.read_entries(state.table.entries(), hashes, weights);
  }
  std::vector<SlotTable::Entry> entries;
  entries.reserve(state.table.size());
  state.table.each_row([&](std::uint64_t hash, const std::byte* row) { entries.push_back({hash, row}); });
  core_.read_entries(entries, hashes, weights);
}

std::array<std::uint64_t, 2> Shard::digest(Slot slot) const {
  core_.owner.check();
  std::array<std::uint64_t, 2> sums{};
  const SlotState& state = core_.at(slot);
  const std::shared_lock lock(state.lock);
  state.table.each_row([&](std::uint64_t hash, const std::byte* row) {
    std::uint64_t first = mix(hash);
    std::uint64_t second = mix(~hash);
    for (std::size_t k = 0; k < core_.rows.stored(); ++k) {  // column by column: padding is not hashed
      for (std::size_t at = 0; at < core_.rows.width(k); at += sizeof(std::uint32_t)) {
        std::uint32_t word = 0;
        std::memcpy(&word, row + core_.rows.offset(k) + at, std::min(sizeof word, core_.rows.width(k) - at));
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
