#include "shard/section_codec.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/threads.h"

namespace shoal {

namespace {

std::size_t aligned(std::size_t n) noexcept {
  return (n + SectionCodec::kAlignment - 1) / SectionCodec::kAlignment * SectionCodec::kAlignment;
}

}  // namespace

std::vector<std::size_t> SectionCodec::offsets(std::size_t rows) const {
  std::vector<std::size_t> offsets{0};
  std::size_t end = rows * sizeof(std::uint64_t);
  for (std::size_t k = 0; k < rows_.stored(); ++k) {
    offsets.push_back(aligned(end));
    end = offsets.back() + rows * rows_.width(k);
  }
  offsets.push_back(aligned(end));
  return offsets;
}

std::size_t SectionCodec::bytes(Slots slots, std::size_t rows) const {
  const Partition partition{rows, slots.count()};
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < slots.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    bytes += share == 0 ? 0 : offsets(share).back();
  }
  return bytes;
}

std::size_t SectionCodec::write(std::span<const SlotTable::Entry> entries,
                                std::vector<std::byte>& section) const {
  const auto offsets = this->offsets(entries.size());
  section.assign(offsets.back(), std::byte{0});
  for (std::size_t r = 0; r < entries.size(); ++r) {
    std::memcpy(section.data() + r * sizeof(std::uint64_t), &entries[r].hash, sizeof(std::uint64_t));
  }
  for (std::size_t k = 0; k + 2 < offsets.size(); ++k) {
    const std::size_t width = rows_.width(k);
    const std::size_t from = rows_.offset(k);
    std::byte* const to = section.data() + offsets[k + 1];
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

void SectionCodec::write_stored(std::span<const SlotTable::Entry> entries, ByteWriter& out) const {
  out.put(std::uint64_t{entries.size()});
  const std::size_t width = rows_.bytes();
  const std::size_t padding = rows_.width(0) % sizeof(float);
  const auto room = out.extend(entries.size() * (sizeof(std::uint64_t) + width));
  std::byte* hash_to = room.data();
  std::byte* row_to = room.data() + entries.size() * sizeof(std::uint64_t);
  for (const SlotTable::Entry& entry : entries) {
    std::memcpy(hash_to, &entry.hash, sizeof entry.hash);
    std::memcpy(row_to, entry.row, width);
    if (padding != 0) {
      std::memset(row_to + rows_.width(0), 0, sizeof(float) - padding);
    }
    hash_to += sizeof entry.hash;
    row_to += width;
  }
}

std::vector<std::uint64_t> SectionCodec::hashes(std::size_t rows, std::span<const std::byte> section) const {
  // Checked first: the product of a count that is too large could overflow.
  SHOAL_CHECK(rows <= section.size() / sizeof(std::uint64_t) && section.size() == offsets(rows).back(),
              "a section of " + std::to_string(section.size()) + " bytes does not hold " +
                  std::to_string(rows) + " rows of this table");
  std::vector<std::uint64_t> hashes(rows);
  if (rows != 0) {
    std::memcpy(hashes.data(), section.data(), rows * sizeof(std::uint64_t));
  }
  SHOAL_CHECK(std::adjacent_find(hashes.begin(), hashes.end(), std::greater_equal<>()) == hashes.end(),
              "the hashes of a section must ascend");
  return hashes;
}

std::size_t SectionCodec::merge(std::size_t base_rows, std::span<const std::byte> base,
                                std::size_t delta_rows, std::span<const std::byte> delta,
                                const DirtyRanges& ranges, std::vector<std::byte>& merged) const {
  const auto old = hashes(base_rows, base);
  const auto changed = hashes(delta_rows, delta);
  SHOAL_CHECK(std::ranges::all_of(changed, [&](std::uint64_t hash) { return ranges.has(hash); }),
              "a delta has a row that lies in none of its ranges");
  struct Row {
    bool is_of_delta;
    std::size_t number;
  };
  std::vector<Row> rows;
  rows.reserve(old.size() + changed.size());
  for (std::size_t i = 0, j = 0; i < old.size() || j < changed.size();) {
    if (j == changed.size() || (i < old.size() && old[i] <= changed[j])) {
      if (!ranges.has(old[i])) {
        rows.push_back({false, i});
      }
      ++i;
    } else {
      rows.push_back({true, j++});
    }
  }
  const auto merged_offsets = offsets(rows.size());
  const auto base_offsets = offsets(old.size());
  const auto delta_offsets = offsets(changed.size());
  merged.assign(merged_offsets.back(), std::byte{0});
  for (std::size_t k = 0; k + 1 < merged_offsets.size(); ++k) {
    const std::size_t width = k == 0 ? sizeof(std::uint64_t) : rows_.width(k - 1);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto& [is_of_delta, number] = rows[r];
      const std::byte* const from =
          is_of_delta ? delta.data() + delta_offsets[k] : base.data() + base_offsets[k];
      std::memcpy(merged.data() + merged_offsets[k] + r * width, from + number * width, width);
    }
  }
  return rows.size();
}

}  // namespace shoal
