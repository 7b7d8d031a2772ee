#include "shard/shard_core.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "shard/workspace.h"

namespace shoal {

namespace {

std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

ShardCore::ShardCore(const TableSpec& table_spec, Slots all_slots, ThreadPool& thread_pool, Locks locks,
                     Budget* memory_budget, std::size_t first_slot, std::size_t end_slot)
    : spec(table_spec),
      slots(all_slots),
      first(first_slot),
      pool(thread_pool),
      rows(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata()),
      layout(rows.bytes(), slots),
      chunks(rows.bytes()),
      admission(spec.lifecycle.admit(), slots),
      initial_row(spec, rows),
      number(next_number()),
      numbers(PreImageLog::kNumberBytes, slots),
      common_lock(locks == Locks::kOne ? std::make_unique<std::shared_mutex>() : nullptr),
      states(new_states(std::min(end_slot, slots.count()))),
      budget(memory_budget, states, first),
      changes(states, slots, rows.bytes(), common_lock == nullptr) {}

SlotStates ShardCore::new_states(std::size_t end_slot) {
  for (const Expiry& rule : spec.lifecycle.expire()) {
    SHOAL_CHECK(rule.kind != Expiry::Kind::kMaxRows || rule.rows >= slots.count(),
                "MaxRows needs at least one row a slot, " + std::to_string(slots.count()) + ", got " +
                    std::to_string(rule.rows) + ": raise it, or make the store with fewer slots");
  }
  SlotStates made;
  made.reserve(end_slot - first);
  for (std::size_t s = first; s < end_slot; ++s) {
    const Slot slot{static_cast<std::uint32_t>(s)};
    made.push_back(std::make_unique<SlotState>(layout, slot, chunks, common_lock.get()));
    if (!admission.admits_all()) {
      made.back()->filter = std::make_unique<AdmissionFilter>(admission, slot);
    }
  }
  return made;
}

void ShardCore::check_slots(std::size_t begin, std::size_t end) const {
  SHOAL_CHECK(begin <= end && begin >= first && end <= this->end(), "there are no such slots");
}

void ShardCore::check_batch(const SlotSlices& batch) const {
  owner.check();
  SHOAL_CHECK(batch.offsets.size() == states.size() + 1 && batch.offsets.front() == 0 &&
                  batch.offsets.back() == batch.hashes.size(),
              "the batch is cut into " + std::to_string(batch.offsets.size() - 1) +
                  " slots, the store into " + std::to_string(states.size()) +
                  ": make it with the store's key_batch()");
}

SlotState& ShardCore::at(Slot slot) const {
  SHOAL_CHECK(index_of(slot) >= first && index_of(slot) < end(),
              "there is no slot " + std::to_string(index_of(slot)));
  return *states[index_of(slot) - first];
}

ShardCore::RowBytes ShardCore::rows_and_bytes() const {
  RowBytes total{.rows = 0, .bytes = 0};
  for (std::size_t s = 0; s < states.size(); ++s) {
    total.rows += states[s]->table.size() + rows_elsewhere(s);
    total.bytes += states[s]->bytes();
  }
  if (source != nullptr) {
    total.bytes = total.rows * (rows.bytes() + 2 * sizeof(std::uint64_t));
  }
  return total;
}

ShardCore::Turn ShardCore::turn() const {
  if (source == nullptr) {
    return {};
  }
  owner.check();  // in a child the parent may have the turn
  return Turn(*source);
}

ShardCore::Writing ShardCore::begin_writing(const SlotSlices& batch, RowLocations*& locations,
                                            RowSource::Use use) {
  changes.wait(batch.hashes.size());
  return {.turn = bring(batch, locations, use), .writers = writers.enter(), .budget = budget.lock()};
}

void ShardCore::with_slots(std::size_t begin, std::size_t end, bool is_change,
                           const std::function<bool(std::size_t, std::size_t)>& use) const {
  if (source == nullptr) {
    use(begin, end);
    return;
  }
  bool goes_on = true;
  for (std::size_t s = begin; s < end && goes_on; ++s) {
    const SlotState& slot = at(Slot{static_cast<std::uint32_t>(s)});
    Turn turn = this->turn();
    if (is_change && changes.is_saving()) {
      const std::size_t changed_rows = slot.table.size() + rows_elsewhere(s - first);
      turn.unlock();
      changes.wait(changed_rows);
      turn.lock();
    }
    source->with_slot(s - first, is_change, [&] { goes_on = use(s, s + 1); });
  }
}

ShardCore::Known ShardCore::known(const SlotSlices& batch, RowLocations* locations) const {
  if (locations != nullptr) {
    SHOAL_CHECK(locations->is_of(batch.hashes), "these row locations are those of another batch");
    locations->reset_for(number, states.size());
  }
  return {locations, locations};
}

void ShardCore::weights_of(std::span<std::byte* const> found, float* weights) const {
  Workspace work(rows);
  std::visit(
      [&](const auto& rule) {
        for (std::size_t i = 0; i < found.size(); i += work.max_rows) {
          const auto run = found.subspan(i, std::min(work.max_rows, found.size() - i));
          PrefetchCursor none;
          if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
            const Block block = work.block(run.size(), rows.dim());
            rows.gather(run, block, none);
            rule.read(block, weights + i * rows.dim());
          } else {
            rows.read_weights(run, weights + i * rows.dim(), none);
          }
        }
      },
      spec.optimizer.rule());
}

void ShardCore::read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                             std::vector<float>& weights) const {
  hashes.resize(entries.size());
  weights.resize(entries.size() * rows.dim());
  std::vector<std::byte*> found(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    hashes[i] = entries[i].hash;
    found[i] = const_cast<std::byte*>(entries[i].row);  // read only
  }
  weights_of(found, weights.data());
}

void ShardCore::see(std::span<std::byte* const> found, std::span<const std::uint32_t> counts,
                    std::uint32_t now) noexcept {
  const RowMetadata metadata = rows.metadata();
  std::array<std::uint64_t, ShardCounters::kAges> returns{};
  for (std::size_t r = 0; r < found.size(); ++r) {
    if (found[r] != nullptr) {
      const std::uint32_t count = counts.empty() ? 1 : counts[r];
      returns[static_cast<std::size_t>(std::bit_width(metadata.see(found[r], count, now)))] += count;
    }
  }
  if (metadata.has(RowMetadata::Column::kClock)) {
    for (std::size_t age = 0; age < ShardCounters::kAges; ++age) {
      if (returns[age] != 0) {
        counters.returns[age].fetch_add(returns[age], std::memory_order_relaxed);
      }
    }
  }
}

}  // namespace shoal
