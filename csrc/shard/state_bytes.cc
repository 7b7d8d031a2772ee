// The whole state of a shard as bytes and back, to make an equal shard elsewhere.
//
//   table   u64 step | f64 rate | u32 clock origin | text base of saves, of exports | u64 counters ...
//   slot    u8 flags | capacity: u64 buckets, slab rows, slab end | u64 rows | hashes | rows as stored,
//           padding 0 | filter | per purpose: u8 bits (0: no ranges), u64 ranges, saved ranges
//           (table/dirty_ranges.h)

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

void ShardCopy::restore(Shard& shard, ByteReader& in) {
  ShardCore& core = shard.core();
  core.owner.check();
  core.step = in.take<std::uint64_t>("step");
  core.rate = in.take<double>("rate");
  core.origin = in.take<std::uint32_t>("clock origin");
  for (const Purpose purpose : {Purpose::kSave, Purpose::kExport}) {
    core.changes.set_base(in.take_text("base", kMaxBase), purpose);
  }
  core.counters.each_of_changes([&](auto& counter) { counter = in.take<std::uint64_t>("counter"); });
}

ShardCopy::ShardCopy(std::shared_ptr<Shard> shard) : shard_(std::move(shard)) {
  ShardCore& core = shard_->core();
  SHOAL_CHECK(!core.changes.has_snapshot(), "this table is being saved: copy it when the save has ended");
  core.owner.check();
  ByteWriter table;
  table.put(core.step.load());
  table.put(core.rate.load());
  table.put(core.origin.load());
  for (const Purpose purpose : {Purpose::kSave, Purpose::kExport}) {
    table.put_text(core.changes.base(purpose));
  }
  core.counters.each_of_changes([&](const auto& counter) { table.put(counter.load()); });
  table_ = table.take();
  heads_.reserve(core.states.size());
  for (const auto& slot : core.states) {
    heads_.push_back(head_of(*slot));
  }
  snapshot_.emplace(*shard_);
}

ShardCopy::SlotHead ShardCopy::head_of(const SlotState& state) const {
  const SlotTable::Capacity capacity = !shard_->has_source() ? state.table.capacity() : SlotTable::Capacity{};
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

std::uint64_t ShardCopy::bytes() const noexcept {
  return table_.size() + snapshot_->rows() * (sizeof(std::uint64_t) + shard_->rows().bytes());
}

void ShardCopy::take(Slot slot, ByteWriter& out) {
  const SlotHead& head = heads_.at(index_of(slot) - shard_->first_slot());
  out.put_raw(head.bytes);
  snapshot_->take_state(slot, out);
  out.put_raw(head.ranges);
}

void ShardCopy::restore(Shard& shard, Slot slot, ByteReader& in) {
  ShardCore& core = shard.core();
  core.owner.check();
  core.with_slots(index_of(slot), index_of(slot) + 1, true, [&](std::size_t, std::size_t) {
    restore_resident(core, slot, in);
    return true;
  });
}

void ShardCopy::restore_resident(ShardCore& core, Slot slot, ByteReader& in) {
  const auto writing = core.writers.enter();
  const auto budget_lock = core.budget.lock();
  SlotState& state = core.at(slot);
  const std::size_t place = index_of(slot) - core.first;
  const std::unique_lock lock(state.lock);
  const auto flags = in.take_between<std::uint8_t>("slot's flags", 0, kAllFlags);
  state.fills = (flags & kFills) != 0;
  state.filter_changed = (flags & kFilterChanged) != 0;
  SlotTable::Capacity capacity;
  capacity.buckets = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_rows = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_end = in.take<std::uint64_t>("slot's capacity");
  capacity.slab_is_small = (flags & kSlabIsSmall) != 0;
  const std::size_t width = core.rows.bytes();
  const std::size_t n = in.take_count("rows", sizeof(std::uint64_t) + width);
  const auto hashes = in.take_raw(n * sizeof(std::uint64_t), "hashes");
  const std::byte* row = in.take_raw(n * width, "rows").data();
  // A slot whose rows were not all in memory has no capacity.
  const bool has_capacity = core.source == nullptr && (capacity.buckets != 0 || n == 0);
  if (has_capacity) {
    state.table.begin_restore(capacity, n);
  } else {
    state.table.reserve(n);
  }
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < n; ++i, row += width) {
    std::uint64_t hash = 0;
    std::memcpy(&hash, hashes.data() + i * sizeof hash, sizeof hash);
    if ((i != 0 && hash <= last) || core.slots.of(hash) != slot) [[unlikely]] {
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
      since.now = std::make_unique<DirtyRanges>(core.slots, bits, count,
                                                in.take_raw(DirtyRanges::saved_bytes(bits, count), "ranges"));
    }
  }
  state.watched = state.is_followed();
  core.budget.check(place, state.bytes(), n);
  core.budget.note(place);
}

}  // namespace shoal
