// Arc: ticks, and the steps of completed clocks.

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/memory.h"
#include "base/units.h"
#include "batch/merge.h"
#include "replica/arc.h"
#include "tier/storage_error.h"

namespace shoal {

namespace {

// The pushes of a clock up to this size leave their memory to those of the next one. Received frames return
// to the heap, which keeps most of what a larger clock has used (keep_freed_memory()).
constexpr std::size_t kMaxIdleBytes = 64 * MiB;

}  // namespace

ArcResult Arc::execute(const TickOp& op) {
  tick(jobs_.get(op.worker.job), op.worker.rank, op.tables);
  return {};
}

void Arc::tick(JobState& job, std::uint32_t rank, std::span<const std::uint32_t> tables) {
  if (job.mode == Mode::kBsp) {
    if (rank >= job.tick_tables.size()) {
      job.tick_tables.resize(rank + std::size_t{1});
    }
    std::vector<std::uint32_t> named;  // without unknown tables, whose number is unbounded
    std::ranges::copy_if(tables, std::back_inserter(named),
                         [&](std::uint32_t id) { return tables_.contains(id); });
    job.pending.tick(job.clocks.clock(rank), named);
    job.tick_tables[rank] = std::move(named);
  }
  job.clocks.tick(rank);
}

ArcResult Arc::execute(const StepOp& op) {
  JobState& job = *jobs_.all()[op.job];
  PendingPushes& pending = job.pending;
  if (pending.empty() || pending.next() >= job.clocks.floor()) {
    job.applied = job.clocks.floor();
    return {};
  }
  SHOAL_DCHECK(pending.next() >= job.applied);
  if (pending.next() > job.applied) {
    job.applied = pending.next();
    return {};
  }
  // Sweeps come before the step: their answers described the rows as they are now.
  for (PendingPushes::Sweep& sweep : pending.first().sweeps) {
    Table* const table = sweep.done ? nullptr : find(sweep.table);
    if (table != nullptr) {
      table->shard->sweep(first_, end_, store_clock(job.number, sweep.table, job.applied), sweep.rules,
                          false);
      table->failed_step.reset();
    }
    sweep.done = true;
  }
  const std::size_t kept = pending.bytes(job.applied);
  while (const auto id = pending.next_table()) {
    if (Table* const table = find(*id)) {
      step_table(job, *id, *table);
    }
    pending.finish_table(*id);
  }
  pending.pop();
  if (kept > kMaxIdleBytes) {
    trim_heap();
  }
  ++job.applied;
  return {};
}

void Arc::step_table(JobState& job, std::uint32_t id, Table& table) {
  PendingPushes::ClockStep& step = job.pending.first();
  Shard& shard = *table.shard;
  const std::size_t dim = shard.rows().dim();
  const Elements elements = shard.spec().optimizer.elements();
  // Counts are added up, also where gradients are averaged.
  const std::size_t divisor =
      job.mean && elements == Elements::kFloat32 ? std::max<std::size_t>(step.ticked, 1) : 1;
  std::vector<SortedList> lists;
  std::size_t total = 0;
  std::size_t longest = 0;
  for (const PendingPushes::Push& push : job.pending.pushes(id)) {
    if (!push.hashes.empty()) {
      lists.push_back({push.hashes, push.grads, push.counts});
      total += push.hashes.size();
      longest = std::max(longest, push.hashes.size());
    }
  }
  SortedList all;
  PooledBuffer hashes;
  PooledBuffer grads;
  PooledBuffer counts;
  if (lists.size() == 1 && divisor == 1) {
    all = lists[0];
  } else if (!lists.empty()) {
    const bool counted = shard.spec().lifecycle.needs_counts();
    if (counted) {
      // Rows of a push without counts occurred once; merging needs explicit counts for all lists.
      const auto ones = workspace_->ones.claim(longest);
      std::ranges::fill(ones, 1U);
      for (SortedList& list : lists) {
        list.counts = list.counts.empty() ? ones.first(list.hashes.size()) : list.counts;
      }
    }
    hashes = workspace_->buffers.acquire(total * sizeof(std::uint64_t));
    grads = workspace_->buffers.acquire(total * dim * sizeof(float));
    counts = workspace_->buffers.acquire(counted ? total * sizeof(std::uint32_t) : 0);
    const MergeOutput room{hashes.as<std::uint64_t>(), grads.as<float>(), counts.as<std::uint32_t>()};
    const std::size_t size = merge(lists, dim, workspace_->pool, workspace_->merge, room, divisor, elements);
    all = {room.hashes.first(size), room.grads.first(size * dim), room.counts.first(counted ? size : 0)};
  }
  const std::uint64_t number = shard.step();
  std::size_t stepped = 0;
  try {
    const OccurrenceCounts occurrences{.counts = all.counts.subspan(all.counts.empty() ? 0 : step.stepped),
                                       .clock = store_clock(job.number, id, job.applied)};
    shard.push(cut(all.hashes.subspan(step.stepped)), all.grads.subspan(step.stepped * dim), occurrences,
               &stepped, nullptr, &workspace_->shard);
  } catch (const MemoryBudgetExceededError& error) {
    table.failed_step = {wire::Status::kResourceExhausted, error.what()};
  } catch (const UserStepError& error) {
    table.failed_step = {wire::Status::kInternal, error.what()};
  } catch (const TierError& error) {
    table.failed_step = {wire::Status::kResourceExhausted, error.what()};
    throw;  // the step is tried again
  } catch (const std::bad_alloc&) {
    step.stepped += stepped;  // the rest follows later, as the same step
    shard.set_step(number);
    throw;
  }
}

}  // namespace shoal
