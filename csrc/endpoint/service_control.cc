// Service: orders of the scheduler, arcs that come and go, and figures.

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/int64_pairs.h"
#include "endpoint/reads.h"
#include "endpoint/service.h"

namespace shoal {

using wire::Status;

void Service::follow(StateRoom room) noexcept {
  state_.follow_arcs(std::move(room));
  advance(released_);
}

template <class IsRefused>
void Service::release_if(const IsRefused& is_refused) noexcept {
  for (const auto& job : state_.jobs) {
    auto& reads = job->deferred.reads();
    for (auto where = reads.begin(); where != reads.end();) {
      const auto next = std::next(where);
      if (is_refused(where->second)) {
        release(job->deferred.take(where), released_);
      }
      where = next;
    }
  }
}

void Service::refuse_deferred() noexcept {
  release_if([&](const DeferredReads::Read& read) {
    cut_read(state_, read.header, read.hashes.as<std::uint64_t>());
    return !state_.cut.refused.empty();
  });
}

// --- orders -----------------------------------------------------------------------------------------------

void Service::forget_worker(const WorkerId& worker) {
  JobRequests* const job = state_.find_job(worker.job);
  if (job == nullptr) {
    return;
  }
  const std::uint32_t rank = worker.rank;
  auto& reads = job->deferred.reads();
  for (auto where = reads.begin(); where != reads.end();) {
    const auto next = std::next(where);
    if (where->second.header.worker == rank) {
      const DeferredReads::Read read = job->deferred.take(where);
      RequestContext request{.peer = read.peer, .header = read.header, .out = released_};
      refuse(request, Status::kFenced);
    }
    where = next;
  }
  state_.saves.cancel({.job = worker.job, .rank = rank});
  if (rank < job->postponed.size()) {
    job->postponed[rank].reset();
  }
  if (rank < job->functions.size()) {
    job->functions[rank].reset();
  }
  for (auto& [id, views] : job->views) {
    if (rank < views.size()) {
      views[rank] = {};
    }
  }
}

ArcResult Service::apply(const Order& order) {
  const auto& arcs = state_.arcs.arcs();
  // If one of these incarnations, of 1 to `last`, is admitted: a sweep that waits for its clock would act
  // afterwards.
  const auto forget = [&](const WorkerId& worker, std::uint32_t last) {
    if (std::ranges::any_of(arcs, [&](const auto& arc) {
          const std::uint32_t known = arc->jobs().incarnation(worker);
          return known != 0 && known <= last;
        })) {
      forget_worker(worker);
    }
  };
  if (const auto* const admit = std::get_if<Admit>(&order); admit != nullptr) {
    const WorkerId worker{.job = admit->job, .rank = admit->rank};
    for (const auto& arc : arcs) {
      arc->jobs().check_admit(worker, admit->incarnation, admit->clock);
    }
    forget(worker, std::max(admit->incarnation, 1U) - 1);
  } else if (const auto* const fence = std::get_if<Fence>(&order); fence != nullptr) {
    forget({.job = fence->job, .rank = fence->rank}, fence->incarnation);
  } else if (const auto* const dismiss = std::get_if<Dismiss>(&order); dismiss != nullptr) {
    forget({.job = dismiss->job, .rank = dismiss->rank}, dismiss->incarnation);
  }
  StateRoom room;
  if (const auto* const start = std::get_if<StartJob>(&order); start != nullptr) {
    room = state_.make_room(arcs.size(), {}, {&start->job, 1});
  } else if (const auto* const table = std::get_if<AddTable>(&order); table != nullptr) {
    room = state_.make_room(arcs.size(), {{table->id, table->spec}});
  }
  ArcResult result = state_.arcs.apply(order);
  state_.metrics.dropped_pushes += result.dropped;
  if (const auto* const drop = std::get_if<DropTable>(&order); drop != nullptr) {
    state_.follow_arcs();
    for (const auto& job : state_.jobs) {
      job->views.erase(drop->id);
    }
    release_if([&](const DeferredReads::Read& read) {
      return read.header.table == drop->id && read.header.op != wire::Op::kSaveBegin;
    });
  }
  follow(std::move(room));
  return result;
}

bool Service::add_shards(std::uint32_t id, const TableSpec& spec,
                         std::span<const std::pair<std::size_t, std::shared_ptr<Shard>>> shards) {
  StateRoom room = state_.make_room(state_.arcs.arcs().size(), {{id, spec}});
  const bool is_everywhere = state_.arcs.add_shards(id, spec, shards);
  state_.follow_arcs(std::move(room));
  return is_everywhere;
}

std::vector<std::uint32_t> Service::tables() const {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, spec] : state_.arcs.tables()) {
    ids.push_back(id);
  }
  return ids;
}

// --- arcs that come and go --------------------------------------------------------------------------------

void Service::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  StateRoom room = state_.make_room(state_.arcs.arcs().size() + ranges.size());
  state_.arcs.serve(ranges);
  state_.epoch = epoch;
  state_.follow_arcs(std::move(room));
  for (const auto& job : state_.jobs) {
    job->functions.clear();  // of other slots
  }
  refuse_deferred();  // now, not when their clock is reached
  follow();
}

void Service::take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to) {
  state_.arcs.check_take(ranges);
  to.reserve(to.size() + ranges.size());
  for (const SlotRange& range : ranges) {
    state_.saves.cancel_holding(state_.arcs.find(range));
  }
  // Nothing below fails.
  for (const SlotRange& range : ranges) {
    state_.saves.cancel_copies(&state_.arcs.find(range));
  }
  state_.arcs.take(ranges, to);
  state_.follow_arcs();
  refuse_deferred();
  advance(released_);
}

void Service::adopt(std::span<std::unique_ptr<Arc>> arcs) {
  std::map<std::uint32_t, TableSpec> tables;
  std::vector<std::uint32_t> jobs;
  for (const auto& arc : arcs) {
    for (const auto& [id, table] : arc->tables()) {
      tables.try_emplace(id, table.shard->spec());
    }
    for (const auto& job : arc->jobs().all()) {
      if (std::ranges::find(jobs, job->number) == jobs.end()) {
        jobs.push_back(job->number);
      }
    }
  }
  StateRoom room = state_.make_room(state_.arcs.arcs().size() + arcs.size(), tables, jobs);
  state_.arcs.adopt(arcs);
  follow(std::move(room));
}

std::shared_ptr<ArcCopy> Service::begin_copy(const SlotRange& range) {
  auto copy = std::make_shared<ArcCopy>(state_.arcs.find(range));
  state_.saves.add_copy(copy);
  return copy;
}

// --- figures ----------------------------------------------------------------------------------------------

std::vector<Service::ArcLoad> Service::arc_loads() const {
  std::vector<ArcLoad> loads;
  for (const ArcGroup::Served& served : state_.arcs.served()) {
    ArcLoad load{.range = {.first = served.first, .end = served.end}};
    for (const auto& [id, table] : served.arc->tables()) {
      const ShardStats stats = table.shard->stats();
      load.rows += stats.rows;
      load.bytes += stats.bytes;
      load.touched += stats.rows_pulled + stats.rows_pushed;
    }
    loads.push_back(load);
  }
  return loads;
}

std::vector<Service::TableLoad> Service::table_loads() const {
  std::vector<TableLoad> loads;
  for (const ArcGroup::Served& served : state_.arcs.served()) {
    for (const auto& [id, table] : served.arc->tables()) {
      loads.push_back({.first_slot = served.first,
                       .table = id,
                       .stats = table.shard->stats(),
                       .tier = table.shard->tier_stats()});
    }
  }
  return loads;
}

std::pair<std::vector<HotKey>, std::uint64_t> Service::hot_keys(std::size_t most) const {
  return {state_.hot_keys.hottest(most), state_.hot_keys.sampled()};
}

std::vector<std::int64_t> Service::peek(std::uint32_t id, std::span<const std::uint64_t> hashes) const {
  std::vector<std::int64_t> numbers;
  std::vector<float> row;
  for (const std::uint64_t hash : hashes) {
    const std::size_t slot = index_of(state_.slots.of(hash));
    Arc* const arc = state_.arcs.serves(slot) ? state_.arcs.arc_of(slot) : nullptr;
    const Arc::Table* const table = arc == nullptr ? nullptr : arc->find(id);
    if (table == nullptr || table->shard->spec().optimizer.elements() != Elements::kInt64Pairs) {
      return {};
    }
    row.resize(table->shard->rows().dim());
    table->shard->state(arc->cut({&hash, 1}), 0, row);
    for (std::size_t e = 0; e < row.size(); e += kInt64Floats) {
      numbers.push_back(static_cast<std::int64_t>(load_int64(&row[e])));
    }
  }
  return numbers;
}

ServiceMetrics Service::metrics() const {
  ServiceMetrics now = state_.metrics;
  const ArcGroup& arcs = state_.arcs;
  for (const auto& job : state_.jobs) {
    now.deferred_reads += job->deferred.size();
    now.deferred_bytes += job->deferred.bytes();
  }
  now.pending_bytes = arcs.pending_bytes();
  now.key_lists = state_.key_lists.size();
  now.key_list_bytes = state_.key_lists.bytes();
  now.budget_bytes = arcs.budget_bytes().value_or(0);
  const auto clocks_of = [&](std::uint32_t number) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks;
    const JobState* const job = arcs.arcs().empty() ? nullptr : arcs.arcs().front()->jobs().find(number);
    const std::size_t ranks = job == nullptr ? 0 : job->clocks.workers().size();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Clocks::Worker& worker = job->clocks.workers()[rank];
      if (worker.admitted) {
        clocks.emplace_back(static_cast<std::uint32_t>(rank), worker.clock);
      }
    }
    return clocks;
  };
  now.applied = arcs.applied(kDefaultJob);
  now.floor = arcs.floor(kDefaultJob);
  now.clocks = clocks_of(kDefaultJob);
  for (const auto& job : std::span(state_.jobs).subspan(1)) {
    now.jobs.push_back({.number = job->number,
                        .applied = arcs.applied(job->number),
                        .floor = arcs.floor(job->number),
                        .clocks = clocks_of(job->number)});
  }
  return now;
}

}  // namespace shoal
