// Arc: writes, each executed once per slot and sequence number.

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "replica/arc.h"

namespace shoal {

namespace {

// Hashes. From here on a search for the end of each slot costs less than reading all hashes.
constexpr std::size_t kFewPerSlot = 4;

}  // namespace

std::uint64_t Arc::erased(const WorkerId& worker, std::uint64_t sequence,
                          std::span<const std::uint64_t> hashes) const noexcept {
  const DedupWindow* const dedup = jobs_.find_window(worker);
  if (dedup == nullptr) {
    return 0;
  }
  const std::span<const std::uint64_t> erased = dedup->find_erased(sequence);
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i + 1 < erased.size(); i += 2) {
    const Slot slot{static_cast<std::uint32_t>(erased[i])};
    const auto first = std::ranges::lower_bound(hashes, slots_.first_hash(slot));
    rows += first != hashes.end() && slots_.of(*first) == slot ? erased[i + 1] : 0;
  }
  return rows;
}

// --- once for every slot ----------------------------------------------------------------------------------

template <class Use>
void Arc::each_slot(const SlotSlices& slices, const Use& use) const {
  const std::size_t n = slices.hashes.size();
  for (std::size_t begin = 0; begin < n;) {
    const std::size_t s = index_of(slots_.of(slices.hashes[begin]));
    const std::size_t end = slices.offsets[s - first_ + 1];
    use(s, begin, end);
    begin = end;
  }
}

SlotSlices Arc::cut(std::span<const std::uint64_t> hashes) {
  const std::size_t n = hashes.size();
  if (n < kFewPerSlot * (end_ - first_)) {
    std::size_t slot = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t hash_slot = index_of(slots_.of(hashes[i])) - first_;
      for (; slot <= hash_slot; ++slot) {
        offsets_[slot] = i;
      }
    }
    std::fill(offsets_.begin() + static_cast<std::ptrdiff_t>(slot), offsets_.end(), n);
    return {hashes, offsets_};
  }
  const std::size_t first = index_of(slots_.of(hashes.front())) - first_;
  const std::size_t last = index_of(slots_.of(hashes.back())) - first_;
  std::fill_n(offsets_.begin(), first + 1, 0);
  // Interpolation search: hashes are uniform, so the end of a slot is near hash_slot expected position.
  const std::size_t stride = std::max<std::size_t>(n / (last - first + 1) * 5 / 4, 1);
  std::size_t at = 0;
  for (std::size_t s = first; s < last; ++s) {
    const std::uint64_t bound = slots_.first_hash(Slot{static_cast<std::uint32_t>(first_ + s + 1)});
    while (at + stride < n && hashes[at + stride] < bound) {
      at += stride + 1;
    }
    const auto begin = hashes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = hashes.begin() + static_cast<std::ptrdiff_t>(std::min(at + stride, n));
    at = static_cast<std::size_t>(std::lower_bound(begin, end, bound) - hashes.begin());
    offsets_[s + 1] = at;
  }
  std::fill(offsets_.begin() + static_cast<std::ptrdiff_t>(last) + 1, offsets_.end(), n);
  return {hashes, offsets_};
}

Remainder Arc::remainder(const WriteId& write, std::span<const std::uint64_t> hashes) {
  DedupWindow& dedup = jobs_.window(write.worker);
  Remainder left{.slices = cut(hashes)};
  if (hashes.empty()) {
    left.any = !dedup.calls().contains(write.sequence);
    return left;
  }
  each_slot(left.slices, [&](std::size_t s, std::size_t begin, std::size_t end) {
    left.done += dedup.slot(s).contains(write.sequence) ? end - begin : 0;
  });
  left.partial = dedup.partial_push(write.sequence);
  left.any = left.done != hashes.size();
  return left;
}

WriteRows Arc::rest(const Remainder& left, const WriteRows& rows, std::size_t dim, std::uint64_t sequence,
                    DedupWindow& dedup, SlotSlices& slices) {
  slices = left.slices;
  if (left.done == 0 && left.partial == nullptr) {
    return rows;
  }
  const auto hashes = rows.hashes;
  const std::span<std::uint64_t> hashes_left = workspace_->hashes_left.claim(hashes.size());
  const std::span<float> values_left = workspace_->values_left.claim(hashes.size() * dim);
  const std::span<std::uint32_t> counts_left = workspace_->counts_left.claim(rows.counts.size());
  std::size_t count = 0;
  each_slot(left.slices, [&](std::size_t s, std::size_t begin, std::size_t end) {
    if (dedup.slot(s).contains(sequence)) {
      return;
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (left.partial != nullptr && index_of(slots_.of(left.partial->next)) == s &&
          hashes[i] < left.partial->next) {
        continue;
      }
      hashes_left[count] = hashes[i];
      std::copy_n(rows.values.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                  values_left.begin() + static_cast<std::ptrdiff_t>(count * dim));
      if (!rows.counts.empty()) {
        counts_left[count] = rows.counts[i];
      }
      ++count;
    }
  });
  slices = cut(hashes_left.first(count));
  return {.hashes = hashes_left.first(count),
          .values = values_left.first(count * dim),
          .counts = counts_left.first(rows.counts.empty() ? 0 : count),
          .is_whole = rows.is_whole};
}

void Arc::mark(const SlotSlices& slices, std::uint64_t sequence, DedupWindow& dedup) const noexcept {
  each_slot(slices, [&](std::size_t s, std::size_t, std::size_t) { dedup.slot(s).mark(sequence); });
  dedup.calls().mark(sequence);
}

// --- push, assign, erase ----------------------------------------------------------------------------------

ArcResult Arc::execute(const PushOp& op) {
  const auto& [write, rows, left, owner] = op;
  Table& target = table(write.table);
  DedupWindow& dedup = jobs_.window(write.worker);
  SlotSlices slices;
  const shoal::Rows& form = target.shard->rows();
  const WriteRows rest_rows =
      rest(left, rows, rows.is_whole ? form.floats() : form.dim(), write.sequence, dedup, slices);
  JobState& writer = jobs_.get(write.worker.job);
  if (writer.mode != Mode::kBsp) {
    step_rows(write, target, slices, rest_rows, dedup);
  } else {
    PendingPushes::Push pending{.rank = write.worker.rank,
                                .sequence = write.sequence,
                                .hashes = rest_rows.hashes,
                                .grads = rest_rows.values,
                                .counts = rest_rows.counts,
                                .owner = owner};
    if (owner == nullptr || rest_rows.hashes.data() != rows.hashes.data()) {
      pending.keep({}, workspace_->buffers);
    }
    writer.pending.add(write.clock, write.table, std::move(pending));
  }
  mark(slices, write.sequence, dedup);
  return {};
}

void Arc::step_rows(const WriteId& write, Table& table, const SlotSlices& slices, const WriteRows& rows,
                    DedupWindow& dedup) {
  const std::uint64_t number = table.shard->step();
  std::size_t stepped = 0;
  if (write.step != 0) {
    table.shard->set_step(write.step - 1);
  }
  try {
    const OccurrenceCounts occurrences{.counts = rows.counts,
                                       .clock = store_clock(write.worker.job, write.table, write.clock)};
    if (rows.is_whole) {
      table.shard->push_whole(slices, rows.values, occurrences, &stepped, &workspace_->shard);
    } else {
      table.shard->push(slices, rows.values, occurrences, &stepped, nullptr, &workspace_->shard);
    }
    table.shard->set_step(std::max(number, table.shard->step()));
  } catch (const std::bad_alloc&) {
    // Record where it stopped: when it is sent again, it continues there, as the same step.
    table.shard->set_step(number);
    const auto& [hashes, offsets] = slices;
    each_slot(slices, [&](std::size_t s, std::size_t, std::size_t end) {
      if (end <= stepped) {
        dedup.slot(s).mark(write.sequence);
      }
    });
    if (stepped < hashes.size() && offsets[index_of(slots_.of(hashes[stepped])) - first_] < stepped) {
      dedup.set_partial_push(write.sequence, hashes[stepped]);
    }
    throw;
  } catch (...) {
    table.shard->set_step(std::max(number, table.shard->step()));
    throw;
  }
}

ArcResult Arc::execute(const AssignOp& op) {
  const auto& [write, rows, left] = op;
  Table& target = table(write.table);
  DedupWindow& dedup = jobs_.window(write.worker);
  SlotSlices slices;
  const WriteRows rest_rows = rest(left, rows, target.shard->rows().dim(), write.sequence, dedup, slices);
  target.shard->assign(slices, rest_rows.values, store_clock(write.worker.job, write.table, write.clock));
  mark(slices, write.sequence, dedup);
  return {};
}

ArcResult Arc::execute(const EraseOp& op) {
  const auto& [write, left] = op;
  Table& target = table(write.table);
  DedupWindow& dedup = jobs_.window(write.worker);
  SlotSlices slices;
  rest(left, {.hashes = left.slices.hashes, .values = {}, .counts = {}}, 0, write.sequence, dedup, slices);
  auto& erased = dedup.erased(write.sequence);
  std::size_t slots = 0;
  each_slot(slices, [&](std::size_t, std::size_t, std::size_t) { ++slots; });
  erased.reserve(erased.size() + 2 * slots);
  const std::span<std::uint32_t> rows = workspace_->counts_left.claim(end_ - first_);
  std::ranges::fill(rows, 0U);
  target.shard->erase(slices, rows);
  each_slot(slices, [&](std::size_t s, std::size_t, std::size_t) {
    if (rows[s - first_] != 0) {
      erased.push_back(s);
      erased.push_back(rows[s - first_]);
    }
  });
  target.failed_step.reset();
  mark(slices, write.sequence, dedup);
  return {};
}

// --- functions and sweeps ---------------------------------------------------------------------------------

ArcResult Arc::execute(const ChangeOp& op) {
  const WriteId& write = op.write;
  DedupWindow& dedup = jobs_.window(write.worker);
  // Reserve room for the answer first: changed rows cannot be restored.
  auto& answer = dedup.answer(write.sequence);
  if (!dedup.calls().contains(write.sequence)) {
    answer = reduce(*table(write.table).shard, op.function, op.parameters, op.first, op.end);
    dedup.calls().mark(write.sequence);
  }
  return {.numbers = answer};
}

ArcResult Arc::execute(const SweepOp& op) {
  const auto& [write, rules] = op;
  DedupWindow& dedup = jobs_.window(write.worker);
  // Reserve room for the answer first: removed rows cannot be restored.
  auto& answer = dedup.swept(write.sequence);
  if (dedup.calls().contains(write.sequence)) {
    return {.words = answer};
  }
  Table& target = table(write.table);
  JobState& writer = jobs_.get(write.worker.job);
  const bool waits = writer.mode == Mode::kBsp;  // for the step of the clock
  const std::uint32_t clock = store_clock(write.worker.job, write.table, write.clock);
  answer = target.shard->sweep(first_, end_, clock, rules, waits);
  if (waits) {
    const std::size_t count = rules.empty() ? target.shard->spec().lifecycle.expire().size() : rules.size();
    answer.resize(Shard::kSweepHead + 2 * count);  // without the words that only a dry run returns
    writer.pending.sweep(write.clock, {.rank = write.worker.rank,
                                       .sequence = write.sequence,
                                       .table = write.table,
                                       .rules = {rules.begin(), rules.end()}});
  } else {
    target.failed_step.reset();
  }
  dedup.calls().mark(write.sequence);
  return {.words = answer};
}

// --- saves ------------------------------------------------------------------------------------------------

ArcResult Arc::execute(const BeginSaveOp& op) {
  const WriteId& write = op.write;
  Table* const saved = find(write.table);
  if (saved == nullptr) {
    return {};
  }
  if (saved->save && saved->save->is_followed) {
    saved->shard->changes().end_base({});  // it has ended without a message
  }
  const bool is_followed = !saved->shard->changes().has_snapshot();
  if (is_followed) {
    saved->shard->changes().begin_base();
  }
  saved->save = {.worker = write.worker, .sequence = write.sequence, .is_followed = is_followed};
  return {};
}

ArcResult Arc::execute(const EndSavesOp& op) {
  const auto& [job, rank, sequence, name] = op;
  for (auto& [id, table] : tables_) {
    if (!table.save || (job && table.save->worker.job != *job) ||
        (rank && table.save->worker.rank != *rank) || (sequence && table.save->sequence != *sequence)) {
      continue;
    }
    if (table.save->is_followed) {
      table.shard->changes().end_base(name);
    } else if (name) {
      table.shard->changes().set_base({});
    }
    table.save.reset();
  }
  return {};
}

// --- loads ------------------------------------------------------------------------------------------------

ArcResult Arc::execute(const LoadBeginOp& op) {
  const WriteId& write = op.write;
  DedupWindow& dedup = jobs_.window(write.worker);
  Table& target = table(write.table);
  disposal_->add(std::exchange(target.loading, op.shard));
  target.loader = write.worker;
  dedup.calls().mark(write.sequence);
  return {};
}

ArcResult Arc::execute(const LoadRowsOp& op) {
  const auto& [write, rows, section] = op;
  DedupWindow& dedup = jobs_.window(write.worker);
  if (!dedup.calls().contains(write.sequence)) {
    table(write.table).loading->restore(rows, section);
    dedup.calls().mark(write.sequence);
  }
  return {};
}

ArcResult Arc::execute(const LoadFilterOp& op) {
  const auto& [write, cut, slot, filter] = op;
  DedupWindow& dedup = jobs_.window(write.worker);
  table(write.table).loading->restore_filter(cut, slot, filter);
  dedup.calls().mark(write.sequence);
  return {};
}

ArcResult Arc::execute(const LoadEndOp& op) {
  const auto& [write, step, table_clock, base] = op;
  DedupWindow& dedup = jobs_.window(write.worker);
  if (dedup.calls().contains(write.sequence)) {
    return {};
  }
  Table& target = table(write.table);
  target.loading->set_step(step);
  // Each job goes on from the loaded clock.
  const JobState& writer = jobs_.get(write.worker.job);
  target.loading->set_clock(table_clock, writer.is_named ? jobs_.first().clocks.greatest() : write.clock);
  target.reached = 0;
  for (const auto& other : jobs_.all()) {
    if (other->is_named) {
      const std::uint32_t now = other.get() == &writer ? write.clock : other->clocks.greatest();
      other->origins[write.table] = table_clock - now;
    }
  }
  if (!base.empty()) {
    target.loading->changes().track(base);
  }
  target.failed_step.reset();
  disposal_->add(std::exchange(target.shard, std::move(target.loading)));
  dedup.calls().mark(write.sequence);
  return {};
}

ArcResult Arc::execute(const DropLoadOp& op) {
  disposal_->add(std::move(table(op.table).loading));
  return {};
}

ArcResult Arc::execute(const MarkOp& op) {
  jobs_.window(op.write.worker).calls().mark(op.write.sequence);
  return {};
}

}  // namespace shoal
