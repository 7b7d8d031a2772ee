// Service: completed clocks, and the reads that they release.

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/memory.h"
#include "batch/merge.h"
#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

namespace {

// The pushes of a clock up to this size leave their memory to those of the next one. Received frames return to the heap, which
// keeps most of what a larger clock has used (keep_freed_memory()).
constexpr std::size_t kMaxIdleBytes = std::size_t{64} << 20U;

}  // namespace

bool Service::is_complete(std::uint32_t clock) const noexcept {
  switch (mode_) {
    case Mode::kBsp:
      return clock <= applied_;
    case Mode::kSsp:
      return clock <= std::uint64_t{clocks_.floor()} + staleness_;
    case Mode::kAsp:
      break;
  }
  return true;
}

void Service::advance(ReplyQueue& out) noexcept {
  for (;;) {
    // Before the next step: a read at this clock must not see it.
    while (!deferred_.empty() && is_complete(deferred_.next_clock())) {
      release(deferred_.pop(), out);
    }
    if (mode_ != Mode::kBsp || applied_ >= clocks_.floor()) {
      return;
    }
    try {
      apply_clock();
    } catch (const std::exception&) {
      ++metrics_.failed_steps;  // the step stays pending, and the next message retries it
      return;
    }
  }
}

void Service::release(DeferredReads::Read&& read, ReplyQueue& out) noexcept {
  const DeferredReads::Read mine = std::move(read);
  const Call call{mine.peer, mine.header, mine.hashes.as<std::uint64_t>(), {}, {}, mine.parameters.bytes(),
                  out};
  try {
    if (call.header.op == wire::Op::kSaveBegin) {
      return save_begin(call);
    }
    Table* const table = find(call.header.table);
    find_refused(call.header, call.hashes);
    if (table == nullptr) {
      send(call, wire::Status::kNoTable);
    } else if (!refused_.empty()) {
      send_done(call, refusal(out));
    } else if ((call.header.op != wire::Op::kReduce && call.header.op != wire::Op::kSweep) ||
               check_epoch(call)) {
      if (is_read(call.header)) {
        answer(call, *table);
      } else {
        sweep(call, *table);
      }
    }
  } catch (const std::exception& error) {
    fail(call, error);
  }
}

void Service::apply_clock() {
  if (pending_.empty() || pending_.next() >= clocks_.floor()) {
    applied_ = clocks_.floor();
    return;
  }
  SHOAL_DCHECK(pending_.next() >= applied_);
  if (pending_.next() > applied_) {
    applied_ = pending_.next();
    return;
  }
  // Sweeps come before the step: their answers described the rows as they are now.
  for (PendingPushes::Sweep& sweep : pending_.first().sweeps) {
    Table* const table = sweep.done ? nullptr : find(sweep.table);
    if (table != nullptr) {
      table->shard->sweep(first_slot_, end_slot_, applied_, sweep.rules, false);
      table->full.clear();
    }
    sweep.done = true;
  }
  const std::size_t kept = pending_.bytes(applied_);
  while (const auto id = pending_.next_table()) {
    if (Table* const table = find(*id)) {
      apply(*id, *table, pending_.first());
    }
    pending_.finish_table(*id);
  }
  pending_.pop();
  if (kept > kMaxIdleBytes) {
    trim_heap();
  }
  ++applied_;
}

void Service::apply(std::uint32_t id, Table& table, PendingPushes::ClockStep& step) {
  Shard& shard = *table.shard;
  const std::size_t dim = shard.rows().dim();
  const std::size_t divisor = mean_ ? std::max<std::size_t>(step.ticked, 1) : 1;
  std::vector<SortedList> lists;
  std::size_t total = 0;
  std::size_t longest = 0;
  for (const PendingPushes::Push& push : pending_.pushes(id)) {
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
      const auto ones = ones_.claim(longest);
      std::ranges::fill(ones, 1U);
      for (SortedList& list : lists) {
        list.counts = list.counts.empty() ? ones.first(list.hashes.size()) : list.counts;
      }
    }
    hashes = buffers_.acquire(total * sizeof(std::uint64_t));
    grads = buffers_.acquire(total * dim * sizeof(float));
    counts = buffers_.acquire(counted ? total * sizeof(std::uint32_t) : 0);
    const MergeOutput room{hashes.as<std::uint64_t>(), grads.as<float>(), counts.as<std::uint32_t>()};
    const std::size_t size = merge(lists, dim, pool_, merge_scratch_, room, divisor);
    all = {room.hashes.first(size), room.grads.first(size * dim), room.counts.first(counted ? size : 0)};
  }
  const std::uint64_t number = shard.step();
  std::size_t stepped = 0;
  try {
    const OccurrenceCounts occurrences{.counts = all.counts.subspan(all.counts.empty() ? 0 : step.stepped),
                                       .clock = applied_};
    shard.push(cut(all.hashes.subspan(step.stepped)), all.grads.subspan(step.stepped * dim), occurrences,
               &stepped);
  } catch (const MemoryBudgetExceededError& error) {
    // No request waits for this step: the next ones to the table report the error.
    table.full = error.what();
  } catch (const std::bad_alloc&) {
    step.stepped += stepped;  // the rest follows later, as the same step
    shard.set_step(number);
    throw;
  }
  ++table.pushes;
}

}  // namespace shoal
