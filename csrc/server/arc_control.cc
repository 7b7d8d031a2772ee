// Arc: orders of the scheduler.

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/arc.h"
#include "tier/tiered_shard.h"

namespace shoal {

Arc::Arc(Slots slots, std::size_t first, std::size_t end)
    : slots_(slots), first_(first), end_(end), offsets_(end - first + 1) {
  jobs_.push_back(std::make_unique<JobState>());
}

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

// --- jobs -------------------------------------------------------------------------------------------------------

JobState* Arc::find_named(std::uint32_t number) const noexcept {
  const auto found = std::ranges::find(jobs_, number, [](const auto& job) { return job->number; });
  return found == jobs_.end() ? nullptr : found->get();
}

JobState& Arc::job(std::uint32_t number) {
  JobState* const found = state_of(number);
  SHOAL_CHECK(found != nullptr, "there is no job " + std::to_string(number));
  return *found;
}

std::uint32_t Arc::named_store_clock(std::uint32_t job, std::uint32_t table,
                                     std::uint32_t clock) const noexcept {
  const JobState* const known = find_named(job);
  const Table* const its = find(table);
  if (known == nullptr || !known->is_named || its == nullptr) {
    return clock;
  }
  return clock + known->origin(table) - its->shard->table_clock(0);
}

std::uint32_t Arc::reached(std::uint32_t id, const Table& table) const noexcept {
  std::uint32_t most = table.reached;
  for (const auto& job : jobs_) {
    if (job->is_named) {
      most = std::max(most, job->origin(id) + job->clocks.greatest());
    }
  }
  return most;
}

void Arc::start_job(std::uint32_t number, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before,
                    bool is_named) {
  auto fresh = std::make_unique<JobState>();
  fresh->number = number;
  fresh->is_named = is_named;
  fresh->mode = mode == Mode::kSsp && staleness == 0 ? Mode::kBsp : mode;
  fresh->staleness = staleness;
  fresh->mean = mean;
  if (is_named) {
    const std::uint32_t now = jobs_.front()->clocks.greatest();
    for (const auto& [id, table] : tables_) {
      fresh->origins[id] = std::max(table.shard->table_clock(now), reached(id, table));
    }
    jobs_.push_back(std::move(fresh));
    return;
  }
  JobState& last = *jobs_.front();
  end_saves(last.number);
  drop_loads(last.number);
  for (auto& [id, table] : tables_) {
    table.full.clear();
    table.shard->set_clock(std::max(table.shard->table_clock(before), reached(id, table)), 0);
  }
  jobs_.front() = std::move(fresh);
}

void Arc::end_job(std::uint32_t number) {
  const auto found =
      std::ranges::find_if(jobs_, [&](const auto& job) { return job->is_named && job->number == number; });
  if (found == jobs_.end()) {
    return;
  }
  end_saves(number);
  drop_loads(number);
  for (auto& [id, table] : tables_) {
    table.reached = std::max(table.reached, (*found)->origin(id) + (*found)->clocks.greatest());
  }
  jobs_.erase(found);
}

void Arc::drop_loads(std::uint32_t number) {
  for (auto& [id, table] : tables_) {
    if (table.loading != nullptr && table.loader.job == number) {
      disposal_->add(std::move(table.loading));
    }
  }
}

// --- workers ----------------------------------------------------------------------------------------------------

std::size_t Arc::forget(JobState& job, std::uint32_t rank) {
  for (auto& [id, table] : tables_) {
    if (table.loader == WorkerId{.job = job.number, .rank = rank}) {
      disposal_->add(std::move(table.loading));
    }
  }
  end_saves(job.number, rank);
  return job.pending.drop(rank, job.clocks.clock(rank));
}

void Arc::check_admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock) const {
  const auto [number, rank] = worker;
  const JobState* const job = find_job(number);
  SHOAL_CHECK(job != nullptr, "there is no job " + std::to_string(number) + " to admit rank " +
                                  std::to_string(rank) + " to: start it first");
  const auto& workers = job->clocks.workers();
  const bool known = rank < workers.size() && workers[rank].incarnation >= incarnation;
  SHOAL_CHECK(known || job->mode != Mode::kBsp || clock >= job->applied,
              "rank " + std::to_string(rank) + " cannot join at clock " + std::to_string(clock) +
                  ": the clocks before " + std::to_string(job->applied) + " are applied; hold() first");
}

bool Arc::replaces(const WorkerId& worker, std::uint32_t incarnation) const noexcept {
  const JobState* const job = find_job(worker.job);
  if (job == nullptr || worker.rank >= job->clocks.workers().size()) {
    return false;
  }
  const Clocks::Worker& known = job->clocks.workers()[worker.rank];
  return known.admitted && known.incarnation < incarnation;
}

bool Arc::serves(const WorkerId& worker, std::uint32_t incarnation) const noexcept {
  const JobState* const job = find_job(worker.job);
  if (job == nullptr || worker.rank >= job->clocks.workers().size()) {
    return false;
  }
  const Clocks::Worker& known = job->clocks.workers()[worker.rank];
  return known.admitted && known.incarnation <= incarnation;
}

std::size_t Arc::admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock) {
  check_admit(worker, incarnation, clock);
  JobState& its = job(worker.job);
  const std::size_t dropped = replaces(worker, incarnation) ? forget(its, worker.rank) : 0;
  if (its.clocks.admit(worker.rank, incarnation, clock) && worker.rank < its.dedup.size()) {
    its.dedup[worker.rank].reset();
  }
  return dropped;
}

LastTick Arc::fence(const WorkerId& worker, std::uint32_t incarnation) {
  JobState* const its = state_of(worker.job);
  if (its == nullptr || !its->clocks.fence(worker.rank, incarnation)) {
    return {};
  }
  return {.clock = its->clocks.clock(worker.rank),
          .tables = worker.rank < its->tick_tables.size() ? its->tick_tables[worker.rank]
                                                          : std::vector<std::uint32_t>()};
}

std::size_t Arc::dismiss(const WorkerId& worker, std::uint32_t incarnation, const LastTick& last) {
  JobState* const its = state_of(worker.job);
  if (its == nullptr) {
    return 0;
  }
  const std::uint32_t rank = worker.rank;
  const auto& workers = its->clocks.workers();
  std::size_t dropped = 0;
  if (serves(worker, incarnation)) {
    // A client ends a clock when every endpoint has ended the previous one, so this is at most one tick. A client that behaves
    // otherwise has only its last tick's tables.
    while (workers[rank].incarnation == incarnation && its->clocks.clock(rank) < last.clock) {
      tick(*its, rank,
           its->clocks.clock(rank) + 1 == last.clock ? std::span<const std::uint32_t>(last.tables)
                                                     : std::span<const std::uint32_t>());
    }
    dropped = forget(*its, rank);
  }
  its->clocks.dismiss(rank, incarnation);
  return dropped;
}

std::uint32_t Arc::hold(std::uint32_t number) {
  JobState* const its = state_of(number);
  return its == nullptr ? 0 : its->clocks.hold();
}

void Arc::resume(std::uint32_t number) {
  if (JobState* const its = state_of(number); its != nullptr) {
    its->clocks.resume();
  }
}

// --- tables -----------------------------------------------------------------------------------------------------

void Arc::set_memory(std::uint64_t slot_bytes) {
  SHOAL_DCHECK(tables_.empty());
  context_->budget.emplace(slots_, slot_bytes * slots_.count(), first_, end_);
}

std::optional<std::uint64_t> Arc::slot_bytes() const noexcept {
  return context_->budget ? std::optional<std::uint64_t>(context_->budget->share()) : std::nullopt;
}

std::shared_ptr<Shard> Arc::make_shard(const TableSpec& spec) {
  struct Owned {
    std::shared_ptr<ShardContext> context;
    Shard shard;
  };
  struct OwnedTiered {
    std::shared_ptr<ShardContext> context;
    TieredShard shard;
  };
  if (context_->tier != nullptr && !context_->budget && TieredShard::suits(spec)) {
    TierSpace& tier = *context_->tier;
    const std::shared_ptr<OwnedTiered> owned(new OwnedTiered{
        context_, TieredShard(spec, slots_, context_->pool, first_, end_, tier.directory(), tier.memory())});
    return {owned, &owned->shard};
  }
  Budget* const budget = context_->budget ? &*context_->budget : nullptr;
  const std::shared_ptr<Owned> owned(
      new Owned{context_, Shard(spec, slots_, context_->pool, Locks::kOne, budget, first_, end_)});
  return {owned, &owned->shard};
}

void Arc::add_table(std::uint32_t id, std::shared_ptr<Shard> shard) {
  tables_.try_emplace(id,
                      Table{.shard = std::move(shard), .loading = {}, .loader = {}, .save = {}, .full = {}});
}

void Arc::drop_table(std::uint32_t id) {
  Table& dropped = table(id);
  disposal_->add(std::move(dropped.shard));
  disposal_->add(std::move(dropped.loading));
  tables_.erase(id);
  for (const auto& job : jobs_) {
    job->pending.drop_table(id);
    job->origins.erase(id);
  }
}

}  // namespace shoal
