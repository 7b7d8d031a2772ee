// Arc: orders of the scheduler.

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/arc.h"

namespace shoal {

Arc::Arc(Slots slots, std::size_t first, std::size_t end)
    : slots_(slots), first_(first), end_(end), offsets_(end - first + 1) {}

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

void Arc::start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before) {
  job_ = job;
  mode_ = mode == Mode::kSsp && staleness == 0 ? Mode::kBsp : mode;
  staleness_ = staleness;
  mean_ = mean;
  clocks_.clear();
  applied_ = 0;
  dedup_.clear();
  tick_tables_.clear();
  pending_.clear();
  end_saves();
  for (auto& [id, table] : tables_) {
    disposal_->add(std::move(table.loading));
    table.full.clear();
    table.shard->set_clock(table.shard->table_clock(before), 0);
  }
}

std::size_t Arc::forget(std::uint32_t rank) {
  for (auto& [id, table] : tables_) {
    if (table.loader == rank) {
      disposal_->add(std::move(table.loading));
    }
  }
  end_saves(rank);
  return pending_.drop(rank, clocks_.clock(rank));
}

void Arc::check_admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) const {
  const auto& workers = clocks_.workers();
  const bool known = rank < workers.size() && workers[rank].incarnation >= incarnation;
  SHOAL_CHECK(known || mode_ != Mode::kBsp || clock >= applied_,
              "rank " + std::to_string(rank) + " cannot join at clock " + std::to_string(clock) +
                  ": the clocks before " + std::to_string(applied_) + " are applied; hold() first");
}

bool Arc::replaces(std::uint32_t rank, std::uint32_t incarnation) const noexcept {
  const auto& workers = clocks_.workers();
  return rank < workers.size() && workers[rank].admitted && workers[rank].incarnation < incarnation;
}

bool Arc::serves(std::uint32_t rank, std::uint32_t incarnation) const noexcept {
  const auto& workers = clocks_.workers();
  return rank < workers.size() && workers[rank].admitted && workers[rank].incarnation <= incarnation;
}

std::size_t Arc::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) {
  check_admit(rank, incarnation, clock);
  const std::size_t dropped = replaces(rank, incarnation) ? forget(rank) : 0;
  if (clocks_.admit(rank, incarnation, clock) && rank < dedup_.size()) {
    dedup_[rank].reset();
  }
  return dropped;
}

LastTick Arc::fence(std::uint32_t rank, std::uint32_t incarnation) {
  if (!clocks_.fence(rank, incarnation)) {
    return {};
  }
  return {.clock = clocks_.clock(rank),
          .tables = rank < tick_tables_.size() ? tick_tables_[rank] : std::vector<std::uint32_t>()};
}

std::size_t Arc::dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last) {
  const auto& workers = clocks_.workers();
  std::size_t dropped = 0;
  if (serves(rank, incarnation)) {
    // A client ends a clock when every endpoint has ended the previous one, so this is at most one tick. A client that behaves
    // otherwise has only its last tick's tables.
    while (workers[rank].incarnation == incarnation && clocks_.clock(rank) < last.clock) {
      tick(rank, clocks_.clock(rank) + 1 == last.clock ? std::span<const std::uint32_t>(last.tables)
                                                       : std::span<const std::uint32_t>());
    }
    dropped = forget(rank);
  }
  clocks_.dismiss(rank, incarnation);
  return dropped;
}

void Arc::set_memory(std::uint64_t slot_bytes) {
  SHOAL_DCHECK(tables_.empty());
  context_->budget.emplace(slots_, slot_bytes * slots_.count(), first_, end_);
}

std::optional<std::uint64_t> Arc::slot_bytes() const noexcept {
  return context_->budget ? std::optional<std::uint64_t>(context_->budget->share()) : std::nullopt;
}

bool Arc::agrees_with(const Arc& other) const noexcept {
  return job_ == other.job_ && mode_ == other.mode_ && clocks_.agrees_with(other.clocks_);
}

std::shared_ptr<Shard> Arc::make_shard(const TableSpec& spec) {
  struct Owned {
    std::shared_ptr<ShardContext> context;
    Shard shard;
  };
  Budget* const budget = context_->budget ? &*context_->budget : nullptr;
  const std::shared_ptr<Owned> owned(
      new Owned{context_, Shard(spec, slots_, context_->pool, Locks::kOne, budget, first_, end_)});
  return {owned, &owned->shard};
}

void Arc::add_table(std::uint32_t id, std::shared_ptr<Shard> shard) {
  tables_.try_emplace(id,
                      Table{.shard = std::move(shard), .loading = {}, .loader = 0, .save = {}, .full = {}});
}

void Arc::drop_table(std::uint32_t id) {
  Table& dropped = table(id);
  disposal_->add(std::move(dropped.shard));
  disposal_->add(std::move(dropped.loading));
  tables_.erase(id);
  pending_.drop_table(id);
}

}  // namespace shoal
