// The whole state of a shard as bytes and back, to make an equal shard elsewhere.
//
//   table   u64 step | f64 rate | u32 clock origin | text base of saves, of exports | u64 counters ...
//   slot    u8 flags | capacity: u64 buckets, slab rows, slab end | u64 rows | hashes | rows as stored, padding 0
//           | filter | per purpose: u8 bits (0: no ranges), u64 ranges, saved ranges (table/dirty_ranges.h)

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "shard/shard.h"
#include "shard/shard_copy.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxBase = 256;
constexpr std::uint8_t kFills = 1;
constexpr std::uint8_t kSlabIsSmall = 2;
constexpr std::uint8_t kFilterChanged = 4;
constexpr std::uint8_t kAllFlags = 7;

}  // namespace

void Shard::save_state(ByteWriter& out) const {
  check_process();
  out.put(step_.load());
  out.put(rate());
  out.put(origin_.load());
  for (const Purpose purpose : {Purpose::kSave, Purpose::kExport}) {
    out.put_text(base(purpose));
  }
  for (const auto* counter :
       {&pushes_, &rows_pushed_, &rows_created_, &rows_erased_, &nonfinite_rows_, &refused_}) {
    out.put(counter->load());
  }
  for (const auto& counter : expired_) {
    out.put(counter.load());
  }
  for (const auto& counter : returns_) {
    out.put(counter.load());
  }
}

void Shard::restore_state(ByteReader& in) {
  check_process();
  step_ = in.take<std::uint64_t>("step");
  rate_ = in.take<double>("rate");
  origin_ = in.take<std::uint32_t>("clock origin");
  {
    const MutexLock lock(saving_.mutex);
    for (std::string& base : saving_.bases) {
      base = in.take_text("base", kMaxBase);
    }
  }
  for (auto* counter :
       {&pushes_, &rows_pushed_, &rows_created_, &rows_erased_, &nonfinite_rows_, &refused_}) {
    *counter = in.take<std::uint64_t>("counter");
  }
  for (auto& counter : expired_) {
    counter = in.take<std::uint64_t>("counter");
  }
  for (auto& counter : returns_) {
    counter = in.take<std::uint64_t>("counter");
  }
}

Shard::SlotHead Shard::head_of(const SlotState& state) const {
  const SlotTable::Capacity capacity = source_ == nullptr ? state.table.capacity() : SlotTable::Capacity{};
  ByteWriter head;
  head.bytes().reserve(32);
  head.put(static_cast<std::uint8_t>((state.fills ? kFills : 0) |
                                     (capacity.slab_is_small ? kSlabIsSmall : 0) |
                                     (state.filter_changed ? kFilterChanged : 0)));
  head.put(capacity.buckets);
  head.put(capacity.slab_rows);
  head.put(capacity.slab_end);
  ByteWriter ranges;
  ranges.bytes().reserve(32);
  for (const SlotState::Since& since : state.changed) {
    ranges.put(static_cast<std::uint8_t>(since.now == nullptr ? 0 : since.now->bits()));
    if (since.now != nullptr) {
      ranges.put(std::uint64_t{since.now->count()});
      since.now->save(ranges.bytes());
    }
  }
  return {.bytes = head.take(), .ranges = ranges.take()};
}

void Shard::write_rows(std::span<const SlotTable::Entry> entries, ByteWriter& out) const {
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

ShardCopy::ShardCopy(std::shared_ptr<Shard> shard) : shard_(std::move(shard)) {
  SHOAL_CHECK(!shard_->has_snapshot(), "this table is being saved: copy it when the save has ended");
  ByteWriter table;
  shard_->save_state(table);
  table_ = table.take();
  heads_.reserve(shard_->tables_.size());
  for (const auto& slot : shard_->tables_) {
    heads_.push_back(shard_->head_of(*slot));
  }
  snapshot_.emplace(*shard_);
}

std::uint64_t ShardCopy::bytes() const noexcept {
  return table_.size() + snapshot_->rows() * (sizeof(std::uint64_t) + shard_->rows().bytes());
}

void ShardCopy::take(Slot slot, ByteWriter& out) {
  const Shard::SlotHead& head = heads_.at(index_of(slot) - shard_->first_slot());
  out.put_raw(head.bytes);
  snapshot_->take_state(slot, out);
  out.put_raw(head.ranges);
}

void Shard::restore_state(Slot slot, ByteReader& in) {
  check_process();
  with_slots(index_of(slot), index_of(slot) + 1, true, [&](std::size_t, std::size_t) {
    restore_slot(slot, in);
    return true;
  });
}

void Shard::restore_slot(Slot slot, ByteReader& in) {
  const auto writing = enter();
  const auto budget_lock = lock_budget();
  SlotState& state = at(slot);
  const std::size_t place = index_of(slot) - first_;
  const std::unique_lock lock(state.lock);
  const auto flags = in.take_between<std::uint8_t>("slot's flags", 0, kAllFlags);
  state.fills = (flags & kFills) != 0;
  state.filter_changed = (flags & kFilterChanged) != 0;
  SlotTable::Capacity capacity;
  capacity.buckets = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_rows = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_end = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_is_small = (flags & kSlabIsSmall) != 0;
  const std::size_t width = rows_.bytes();
  const std::size_t n = in.take_count("rows", sizeof(std::uint64_t) + width);
  const auto hashes = in.take_raw(n * sizeof(std::uint64_t), "hashes");
  const std::byte* row = in.take_raw(n * width, "rows").data();
  // A slot whose rows were not all in memory has no capacity.
  const bool has_capacity = source_ == nullptr && (capacity.buckets != 0 || n == 0);
  if (has_capacity) {
    state.table.begin_restore(capacity, n);
  } else {
    state.table.reserve(n);
  }
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < n; ++i, row += width) {
    std::uint64_t hash = 0;
    std::memcpy(&hash, hashes.data() + i * sizeof hash, sizeof hash);
    if ((i != 0 && hash <= last) || slots_.of(hash) != slot) [[unlikely]] {
      in.check(false, "hashes", "must ascend within their slot");
    }
    last = hash;
    std::memcpy(state.table.insert(hash), row, width);
  }
  if (has_capacity) {
    state.table.finish_restore(capacity);
  }
  if (state.filter != nullptr) {
    state.filter->restore_all(in);
  }
  for (SlotState::Since& since : state.changed) {
    if (const auto bits = in.take<std::uint8_t>("ranges"); bits != 0) {
      const auto count = in.take<std::uint64_t>("ranges");
      in.check(bits <= DirtyRanges::kMaxBits && count <= std::uint64_t{1} << bits, "ranges", "are too many");
      since.now = std::make_unique<DirtyRanges>(slots_, bits, count,
                                                in.take_raw(DirtyRanges::saved_bytes(bits, count), "ranges"));
    }
  }
  state.watched = state.is_followed();
  if (budget_ != nullptr && bytes_of(state) > allowed(place)) {
    throw_over_budget(place, n);
  }
  note(place);
}

}  // namespace shoal
