// Arc: writes, each executed once per slot and sequence number.

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/arc.h"

namespace shoal {

namespace {

// Hashes. From here on a search for the end of each slot costs less than reading all hashes.
constexpr std::size_t kFewPerSlot = 4;

}  // namespace

DedupWindow& Arc::history(const WorkerId& worker) {
  auto& windows = job(worker.job).dedup;
  if (worker.rank >= windows.size()) {
    windows.resize(worker.rank + std::size_t{1});
  }
  if (windows[worker.rank] == nullptr) {
    windows[worker.rank] = std::make_unique<DedupWindow>(first_, end_);
  }
  return *windows[worker.rank];
}

DedupWindow* Arc::find_history(const WorkerId& worker) const noexcept {
  const JobState* const job = find_job(worker.job);
  return job == nullptr ? nullptr : job->find_history(worker.rank);
}

bool Arc::has_done(const WorkerId& worker, std::uint64_t sequence) const noexcept {
  DedupWindow* const dedup = find_history(worker);
  return dedup != nullptr && dedup->calls().contains(sequence);
}

bool Arc::has_done(const WorkerId& worker, std::uint64_t sequence, std::size_t slot) const noexcept {
  DedupWindow* const dedup = find_history(worker);
  return dedup != nullptr && dedup->slot(slot).contains(sequence);
}

std::uint64_t Arc::erased(const WorkerId& worker, std::uint64_t sequence,
                          std::span<const std::uint64_t> hashes) const noexcept {
  const DedupWindow* const dedup = find_history(worker);
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

// --- once for every slot ----------------------------------------------------------------------------------------

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
      const std::size_t its = index_of(slots_.of(hashes[i])) - first_;
      for (; slot <= its; ++slot) {
        offsets_[slot] = i;
      }
    }
    std::fill(offsets_.begin() + static_cast<std::ptrdiff_t>(slot), offsets_.end(), n);
    return {hashes, offsets_};
  }
  const std::size_t first = index_of(slots_.of(hashes.front())) - first_;
  const std::size_t last = index_of(slots_.of(hashes.back())) - first_;
  std::fill_n(offsets_.begin(), first + 1, 0);
  // Interpolation search: hashes are uniform, so the end of a slot is near its expected position.
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

Arc::Fresh Arc::fresh(const Write& write, std::span<const std::uint64_t> hashes) {
  DedupWindow& dedup = history(write.worker);
  Fresh fresh{.slices = cut(hashes)};
  if (hashes.empty()) {
    fresh.any = !dedup.calls().contains(write.sequence);
    return fresh;
  }
  each_slot(fresh.slices, [&](std::size_t s, std::size_t begin, std::size_t end) {
    fresh.done += dedup.slot(s).contains(write.sequence) ? end - begin : 0;
  });
  fresh.partial = dedup.partial_push(write.sequence);
  fresh.any = fresh.done != hashes.size();
  return fresh;
}

Arc::Rows Arc::rest(const Fresh& fresh, const Rows& rows, std::size_t dim, std::uint64_t sequence,
                    DedupWindow& dedup, SlotSlices& slices) {
  slices = fresh.slices;
  if (fresh.done == 0 && fresh.partial == nullptr) {
    return rows;
  }
  const auto hashes = rows.hashes;
  const std::span<std::uint64_t> some = workspace_->some_hashes.claim(hashes.size());
  const std::span<float> some_values = workspace_->some_values.claim(hashes.size() * dim);
  const std::span<std::uint32_t> some_counts = workspace_->some_counts.claim(rows.counts.size());
  std::size_t count = 0;
  each_slot(fresh.slices, [&](std::size_t s, std::size_t begin, std::size_t end) {
    if (dedup.slot(s).contains(sequence)) {
      return;
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (fresh.partial != nullptr && index_of(slots_.of(fresh.partial->next)) == s &&
          hashes[i] < fresh.partial->next) {
        continue;
      }
      some[count] = hashes[i];
      std::copy_n(rows.values.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                  some_values.begin() + static_cast<std::ptrdiff_t>(count * dim));
      if (!rows.counts.empty()) {
        some_counts[count] = rows.counts[i];
      }
      ++count;
    }
  });
  slices = cut(some.first(count));
  return {.hashes = some.first(count),
          .values = some_values.first(count * dim),
          .counts = some_counts.first(rows.counts.empty() ? 0 : count),
          .is_whole = rows.is_whole};
}

void Arc::mark(const SlotSlices& slices, std::uint64_t sequence, DedupWindow& dedup) const noexcept {
  each_slot(slices, [&](std::size_t s, std::size_t, std::size_t) { dedup.slot(s).mark(sequence); });
  dedup.calls().mark(sequence);
}

// --- push, assign, erase ----------------------------------------------------------------------------------------

void Arc::push(const Write& write, const Rows& rows, const Fresh& fresh, std::shared_ptr<const void> owner) {
  Table& target = table(write.table);
  DedupWindow& dedup = history(write.worker);
  SlotSlices slices;
  const shoal::Rows& form = target.shard->rows();
  const Rows some =
      rest(fresh, rows, rows.is_whole ? form.floats() : form.dim(), write.sequence, dedup, slices);
  JobState& writer = job(write.worker.job);
  if (writer.mode != Mode::kBsp) {
    step_rows(write, target, slices, some, dedup);
  } else {
    PendingPushes::Push kept{.rank = write.worker.rank,
                             .sequence = write.sequence,
                             .hashes = some.hashes,
                             .grads = some.values,
                             .counts = some.counts,
                             .owner = std::move(owner)};
    if (kept.owner == nullptr || some.hashes.data() != rows.hashes.data()) {
      kept.keep({}, workspace_->buffers);
    }
    writer.pending.add(write.clock, write.table, std::move(kept));
  }
  mark(slices, write.sequence, dedup);
}

void Arc::step_rows(const Write& write, Table& table, const SlotSlices& slices, const Rows& rows,
                    DedupWindow& dedup) {
  std::size_t stepped = 0;
  try {
    const OccurrenceCounts occurrences{.counts = rows.counts,
                                       .clock = store_clock(write.worker.job, write.table, write.clock)};
    if (rows.is_whole) {
      table.shard->push_whole(slices, rows.values, occurrences, &stepped, &workspace_->shard);
    } else {
      table.shard->push(slices, rows.values, occurrences, &stepped, nullptr, &workspace_->shard);
    }
  } catch (const std::bad_alloc&) {
    // Record where it stopped: when it is sent again, it continues there.
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
  }
}

void Arc::assign(const Write& write, const Rows& rows, const Fresh& fresh) {
  Table& target = table(write.table);
  DedupWindow& dedup = history(write.worker);
  SlotSlices slices;
  const Rows some = rest(fresh, rows, target.shard->rows().dim(), write.sequence, dedup, slices);
  target.shard->assign(slices, some.values, store_clock(write.worker.job, write.table, write.clock));
  mark(slices, write.sequence, dedup);
}

void Arc::erase(const Write& write, const Fresh& fresh) {
  Table& target = table(write.table);
  DedupWindow& dedup = history(write.worker);
  SlotSlices slices;
  rest(fresh, {.hashes = fresh.slices.hashes, .values = {}, .counts = {}}, 0, write.sequence, dedup, slices);
  auto& erased = dedup.erased(write.sequence);
  std::size_t slots = 0;
  each_slot(slices, [&](std::size_t, std::size_t, std::size_t) { ++slots; });
  erased.reserve(erased.size() + 2 * slots);
  const std::span<std::uint32_t> rows = workspace_->some_counts.claim(end_ - first_);
  std::ranges::fill(rows, 0U);
  target.shard->erase(slices, rows);
  each_slot(slices, [&](std::size_t s, std::size_t, std::size_t) {
    if (rows[s - first_] != 0) {
      erased.push_back(s);
      erased.push_back(rows[s - first_]);
    }
  });
  target.full.clear();
  mark(slices, write.sequence, dedup);
}

// --- functions and sweeps ---------------------------------------------------------------------------------------

const std::vector<double>& Arc::change(const Write& write, Function function,
                                       std::span<const double> parameters, std::size_t first,
                                       std::size_t end) {
  DedupWindow& dedup = history(write.worker);
  // Reserve room for the answer first: changed rows cannot be restored.
  auto& answer = dedup.answer(write.sequence);
  if (!dedup.calls().contains(write.sequence)) {
    answer = reduce(*table(write.table).shard, function, parameters, first, end);
    dedup.calls().mark(write.sequence);
  }
  return answer;
}

const std::vector<std::uint64_t>& Arc::sweep(const Write& write, std::span<const Expiry> rules) {
  DedupWindow& dedup = history(write.worker);
  // Reserve room for the answer first: removed rows cannot be restored.
  auto& answer = dedup.swept(write.sequence);
  if (dedup.calls().contains(write.sequence)) {
    return answer;
  }
  Table& target = table(write.table);
  JobState& writer = job(write.worker.job);
  const bool keeps = writer.mode == Mode::kBsp;
  const std::uint32_t clock = store_clock(write.worker.job, write.table, write.clock);
  answer = target.shard->sweep(first_, end_, clock, rules, keeps);
  if (keeps) {
    const std::size_t count = rules.empty() ? target.shard->spec().lifecycle.expire().size() : rules.size();
    answer.resize(Shard::kSweepHead + 2 * count);  // without the words that only a dry run returns
    writer.pending.sweep(write.clock, {.rank = write.worker.rank,
                                       .sequence = write.sequence,
                                       .table = write.table,
                                       .rules = {rules.begin(), rules.end()}});
  } else {
    target.full.clear();
  }
  dedup.calls().mark(write.sequence);
  return answer;
}

// --- saves ------------------------------------------------------------------------------------------------------

void Arc::begin_save(const Write& write) {
  Table* const saved = find(write.table);
  if (saved == nullptr) {
    return;
  }
  if (saved->save && saved->save->is_followed) {
    saved->shard->end_base({});  // it has ended without a message
  }
  const bool is_followed = !saved->shard->has_snapshot();
  if (is_followed) {
    saved->shard->begin_base();
  }
  saved->save = {.worker = write.worker, .sequence = write.sequence, .is_followed = is_followed};
}

void Arc::end_saves(std::optional<std::uint32_t> job, std::optional<std::uint32_t> rank,
                    std::optional<std::uint64_t> sequence, const std::optional<std::string>& name) {
  for (auto& [id, table] : tables_) {
    if (!table.save || (job && table.save->worker.job != *job) ||
        (rank && table.save->worker.rank != *rank) || (sequence && table.save->sequence != *sequence)) {
      continue;
    }
    if (table.save->is_followed) {
      table.shard->end_base(name);
    } else if (name) {
      table.shard->forget_base();
    }
    table.save.reset();
  }
}

// --- loads ------------------------------------------------------------------------------------------------------

void Arc::load_begin(const Write& write, std::shared_ptr<Shard> shard) {
  DedupWindow& dedup = history(write.worker);
  Table& target = table(write.table);
  disposal_->add(std::exchange(target.loading, std::move(shard)));
  target.loader = write.worker;
  dedup.calls().mark(write.sequence);
}

void Arc::load_rows(const Write& write, std::size_t rows, std::span<const std::byte> section) {
  DedupWindow& dedup = history(write.worker);
  if (!dedup.calls().contains(write.sequence)) {
    table(write.table).loading->restore(rows, section);
    dedup.calls().mark(write.sequence);
  }
}

void Arc::load_filter(const Write& write, Slots cut, Slot slot, std::span<const std::byte> filter) {
  DedupWindow& dedup = history(write.worker);
  table(write.table).loading->restore_filter(cut, slot, filter);
  dedup.calls().mark(write.sequence);
}

void Arc::load_end(const Write& write, std::uint64_t step, std::uint32_t table_clock,
                   const std::string& base) {
  DedupWindow& dedup = history(write.worker);
  if (dedup.calls().contains(write.sequence)) {
    return;
  }
  Table& target = table(write.table);
  target.loading->set_step(step);
  // Each job goes on from the loaded clock.
  const JobState& writer = job(write.worker.job);
  target.loading->set_clock(table_clock, writer.is_named ? jobs_.front()->clocks.greatest() : write.clock);
  target.reached = 0;
  for (const auto& one : jobs_) {
    if (one->is_named) {
      const std::uint32_t now = one.get() == &writer ? write.clock : one->clocks.greatest();
      one->origins[write.table] = table_clock - now;
    }
  }
  if (!base.empty()) {
    target.loading->track(base);
  }
  target.full.clear();
  disposal_->add(std::exchange(target.shard, std::move(target.loading)));
  dedup.calls().mark(write.sequence);
}

void Arc::drop_loading(std::uint32_t id) { disposal_->add(std::move(table(id).loading)); }

}  // namespace shoal
