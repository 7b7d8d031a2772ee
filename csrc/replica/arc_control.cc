// Arc: orders of the scheduler.

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "replica/arc.h"
#include "tier/tier.h"

namespace shoal {

namespace {

constexpr std::uint32_t kMostTicks = 1U << 16U;  // of a worker that is dismissed, far more than it can lack

}  // namespace

Arc::Arc(Slots slots, std::size_t first, std::size_t end)
    : slots_(slots), first_(first), end_(end), jobs_({first, end}), offsets_(end - first + 1) {}

Arc::Arc(Slots slots, std::size_t first, std::size_t end, ArcWorkspace& workspace, Disposal& disposal)
    : Arc(slots, first, end) {
  move_to(workspace, disposal);
}

const Arc::Table* Arc::find(std::uint32_t id) const noexcept {
  const auto table = tables_.find(id);
  return table == tables_.end() ? nullptr : &table->second;
}

Arc::Table* Arc::find(std::uint32_t id) noexcept {
  const auto table = tables_.find(id);
  return table == tables_.end() ? nullptr : &table->second;
}

Arc::Table& Arc::table(std::uint32_t id) {
  Table* const found = find(id);
  SHOAL_CHECK(found != nullptr, "there is no table " + std::to_string(id));
  return *found;
}

// --- jobs -------------------------------------------------------------------------------------------------

std::uint32_t Arc::named_store_clock(std::uint32_t job, std::uint32_t table,
                                     std::uint32_t clock) const noexcept {
  const JobState* const begun = jobs_.find_named(job);
  const Table* const served = find(table);
  if (begun == nullptr || !begun->is_named || served == nullptr) {
    return clock;
  }
  return clock + begun->origin(table) - served->shard->table_clock(0);
}

std::uint32_t Arc::reached(std::uint32_t id, const Table& table) const noexcept {
  std::uint32_t greatest = table.reached;
  for (const auto& job : jobs_.all()) {
    if (job->is_named) {
      greatest = std::max(greatest, job->origin(id) + job->clocks.greatest());
    }
  }
  return greatest;
}

ArcResult Arc::execute(const StartJob& order) {
  if (jobs_.find(order.job) != nullptr) {
    return {};
  }
  auto begun = std::make_unique<JobState>();
  begun->number = order.job;
  begun->is_named = order.is_named;
  begun->mode = order.mode == Mode::kSsp && order.staleness == 0 ? Mode::kBsp : order.mode;
  begun->staleness = order.staleness;
  begun->mean = order.mean;
  if (order.is_named) {
    const std::uint32_t now = jobs_.first().clocks.greatest();
    for (const auto& [id, table] : tables_) {
      begun->origins[id] = std::max(table.shard->table_clock(now), reached(id, table));
    }
    jobs_.begin(std::move(begun));
    return {};
  }
  const JobState& last = jobs_.first();
  execute(EndSavesOp{.job = last.number});
  drop_loads(last.number);
  for (auto& [id, table] : tables_) {
    table.failed_step.reset();
    table.shard->set_clock(std::max(table.shard->table_clock(order.before), reached(id, table)), 0);
  }
  jobs_.begin(std::move(begun));
  return {};
}

ArcResult Arc::execute(const EndJob& order) {
  const JobState* const ended = jobs_.find_named(order.job);
  if (ended == nullptr || !ended->is_named) {
    return {};
  }
  execute(EndSavesOp{.job = order.job});
  drop_loads(order.job);
  for (auto& [id, table] : tables_) {
    table.reached = std::max(table.reached, ended->origin(id) + ended->clocks.greatest());
  }
  jobs_.end(*ended);
  return {};
}

void Arc::drop_loads(std::uint32_t number) {
  for (auto& [id, table] : tables_) {
    if (table.loading != nullptr && table.loader.job == number) {
      disposal_->add(std::move(table.loading));
    }
  }
}

// --- workers ----------------------------------------------------------------------------------------------

std::size_t Arc::forget(JobState& job, std::uint32_t rank) {
  for (auto& [id, table] : tables_) {
    if (table.loader == WorkerId{.job = job.number, .rank = rank}) {
      disposal_->add(std::move(table.loading));
    }
  }
  execute(EndSavesOp{.job = job.number, .rank = rank});
  return job.pending.drop(rank, job.clocks.clock(rank));
}

ArcResult Arc::execute(const Admit& order) {
  const WorkerId worker{.job = order.job, .rank = order.rank};
  jobs_.check_admit(worker, order.incarnation, order.clock);
  JobState& joined = jobs_.get(order.job);
  const std::uint32_t before = jobs_.incarnation(worker);
  const std::size_t dropped = before != 0 && before < order.incarnation ? forget(joined, order.rank) : 0;
  if (joined.clocks.admit(order.rank, order.incarnation, order.clock) && order.rank < joined.dedup.size()) {
    joined.dedup[order.rank].reset();
  }
  return {.dropped = dropped};
}

ArcResult Arc::execute(const Fence& order) {
  JobState* const fenced = jobs_.find(order.job);
  if (fenced == nullptr || !fenced->clocks.fence(order.rank, order.incarnation)) {
    return {};
  }
  return {.last = {.clock = fenced->clocks.clock(order.rank),
                   .tables = order.rank < fenced->tick_tables.size() ? fenced->tick_tables[order.rank]
                                                                     : std::vector<std::uint32_t>()}};
}

ArcResult Arc::execute(const Dismiss& order) {
  JobState* const left = jobs_.find(order.job);
  if (left == nullptr) {
    return {};
  }
  const std::uint32_t rank = order.rank;
  const auto& workers = left->clocks.workers();
  std::size_t dropped = 0;
  const std::uint32_t known = jobs_.incarnation({.job = order.job, .rank = rank});
  if (known != 0 && known <= order.incarnation) {
    // A client ends a clock when every endpoint has ended the previous one, so this is at most one tick. A
    // client that behaves otherwise has only its last tick's tables. No scheduler asks for more than kMostTicks:
    // an order that does keeps no server busy, and makes no step for each.
    const std::uint64_t most = std::uint64_t{left->clocks.clock(rank)} + kMostTicks;
    while (workers[rank].incarnation == order.incarnation &&
           left->clocks.clock(rank) < std::min<std::uint64_t>(order.clock, most)) {
      tick(*left, rank,
           left->clocks.clock(rank) + 1 == order.clock ? std::span<const std::uint32_t>(order.tables)
                                                       : std::span<const std::uint32_t>());
    }
    dropped = forget(*left, rank);
  }
  left->clocks.dismiss(rank, order.incarnation);
  return {.dropped = dropped, .clock = left->clocks.greatest()};
}

ArcResult Arc::execute(const Hold& order) {
  JobState* const held = jobs_.find(order.job);
  return {.clock = held == nullptr ? 0 : held->clocks.hold()};
}

ArcResult Arc::execute(const Resume& order) {
  if (JobState* const held = jobs_.find(order.job); held != nullptr) {
    held->clocks.resume();
  }
  return {};
}

// --- tables -----------------------------------------------------------------------------------------------

ArcResult Arc::execute(const SetMemory& order) {
  SHOAL_DCHECK(tables_.empty());
  context_->budget.emplace(slots_, order.slot_bytes * slots_.count(), first_, end_);
  return {};
}

std::optional<std::uint64_t> Arc::slot_bytes() const noexcept {
  return context_->budget ? std::optional<std::uint64_t>(context_->budget->share()) : std::nullopt;
}

std::function<std::shared_ptr<Shard>(const TableSpec&)> Arc::shard_maker() const {
  struct Owned {
    std::shared_ptr<ShardContext> context;
    Shard shard;
  };
  return [context = context_, slots = slots_, first = first_,
          end = end_](const TableSpec& spec) -> std::shared_ptr<Shard> {
    Budget* const budget = context->budget ? &*context->budget : nullptr;
    const std::shared_ptr<Owned> owned(
        new Owned{context, Shard(spec, slots, context->pool, Locks::kOne, budget, first, end)});
    if (context->tier != nullptr && budget == nullptr && Tier::suits(spec)) {
      TierSpace& tier = *context->tier;
      owned->shard.set_source(std::make_unique<Tier>(owned->shard, tier.directory(), tier.memory()));
    }
    return {owned, &owned->shard};
  };
}

ArcResult Arc::execute(const AddShardOp& op) {
  tables_.try_emplace(op.id,
                      Table{.shard = op.shard, .loading = {}, .loader = {}, .save = {}, .failed_step = {}});
  return {};
}

ArcResult Arc::execute(const AddTable& order) {
  if (find(order.id) == nullptr) {
    execute(AddShardOp{.id = order.id, .shard = shard_maker()(order.spec)});
  }
  return {};
}

ArcResult Arc::execute(const DropTable& order) {
  Table* const dropped = find(order.id);
  if (dropped == nullptr) {
    return {};
  }
  disposal_->add(std::move(dropped->shard));
  disposal_->add(std::move(dropped->loading));
  tables_.erase(order.id);
  for (const auto& job : jobs_.all()) {
    job->pending.drop_table(order.id);
    job->origins.erase(order.id);
  }
  return {};
}

}  // namespace shoal
