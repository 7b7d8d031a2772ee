// Service: orders of the scheduler.

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "server/service.h"
#include "server/service_table.h"
#include "shard/spec_bytes.h"

namespace shoal {

using wire::Status;

template <class Change>
void Service::control(const Change& change) {
  const std::lock_guard lock(mutex_);
  change();
  compare_arcs();
  advance(released_);
  if (waker_ && !released_.replies().empty()) {
    waker_();
  }
}

void Service::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  waker_ = std::move(waker);
}

void Service::set_clock(NanosecondClock clock) {
  const std::lock_guard lock(mutex_);
  clock_ = clock;
}

void Service::serve_ranges(const std::vector<SlotRange>& ranges) {
  std::vector<Served> served;
  std::vector<std::unique_ptr<Arc>> fresh;
  std::size_t at = 0;
  for (const SlotRange& range : ranges) {
    SHOAL_CHECK(range.first <= range.end && range.end <= slots_.count(),
                "there are no slots [" + std::to_string(range.first) + ", " + std::to_string(range.end) +
                    ") of " + std::to_string(slots_.count()));
    SHOAL_CHECK(range.first >= at, "the ranges of slots must ascend: " + std::to_string(range.first) +
                                       " comes after " + std::to_string(at));
    at = range.end;
    const std::size_t before = served.size();
    std::size_t covered = 0;
    for (const auto& arc : arcs_) {
      const std::size_t first = std::max(range.first, arc->first_slot());
      const std::size_t end = std::min(range.end, arc->end_slot());
      if (first < end) {
        SHOAL_CHECK(before == 0 || served[before - 1].arc != arc.get(),
                    "the slots that an arc serves must be adjacent");
        served.push_back({.arc = arc.get(), .first = first, .end = end});
        covered += end - first;
      }
    }
    if (covered == range.end - range.first) {
      continue;
    }
    SHOAL_CHECK(covered == 0, "an arc of the slots [" + std::to_string(range.first) + ", " +
                                  std::to_string(range.end) + ") overlaps another");
    SHOAL_CHECK(!has_begun_, "arcs are made before the first job");
    fresh.push_back(std::make_unique<Arc>(slots_, range.first, range.end, workspace_, disposal_));
    Arc& arc = *fresh.back();
    arc.set_tier(limits_.tier);
    if (slot_bytes_) {
      arc.set_memory(*slot_bytes_);
    }
    for (const auto& [id, table] : tables_) {
      arc.add_table(id, arc.make_shard(table->spec));
    }
    served.push_back({.arc = &arc, .first = range.first, .end = range.end});
  }
  slices_.reserve(arcs_.size() + fresh.size());
  arcs_.reserve(arcs_.size() + fresh.size());
  std::ranges::move(fresh, std::back_inserter(arcs_));
  served_ = std::move(served);
  index_arcs();
  compare_arcs();
}

void Service::index_arcs() noexcept {
  std::ranges::sort(arcs_, {}, [](const auto& arc) { return arc->first_slot(); });
  std::ranges::fill(arc_of_, nullptr);
  for (const auto& arc : arcs_) {
    std::fill(arc_of_.begin() + static_cast<std::ptrdiff_t>(arc->first_slot()),
              arc_of_.begin() + static_cast<std::ptrdiff_t>(arc->end_slot()), arc.get());
  }
  limit_waiting();
}

std::optional<std::uint64_t> Service::budget_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const Served& served : served_) {
    const auto share = served.arc->slot_bytes();
    if (!share) {
      return std::nullopt;
    }
    bytes += *share * (served.end - served.first);
  }
  return served_.empty() ? std::nullopt : std::optional(bytes);
}

void Service::limit_waiting() noexcept {
  limits_ = given_limits_;
  if (const auto budget = budget_bytes()) {
    const std::size_t most = std::max<std::uint64_t>(*budget / 4, kMinWaitingBytes);
    limits_.pending_bytes = std::min(limits_.pending_bytes, most);
    limits_.deferred_bytes = std::min(limits_.deferred_bytes, most);
  }
}

void Service::compare_arcs() noexcept {
  for (const auto& job : jobs_) {
    const JobState* const first = arcs_.empty() ? nullptr : arcs_.front()->find_job(job->number);
    job->arcs_agree = std::ranges::all_of(arcs_, [&](const auto& arc) {
      const JobState* const its = arc->find_job(job->number);
      return its != nullptr && first != nullptr && its->number == job->number && its->agrees_with(*first);
    });
  }
  for (const auto& [id, table] : tables_) {
    table->is_everywhere =
        std::ranges::all_of(arcs_, [id = id](const auto& arc) { return arc->find(id) != nullptr; });
  }
}

void Service::refuse_deferred() noexcept {
  for (const auto& job : jobs_) {
    auto& reads = job->deferred.reads();
    for (auto where = reads.begin(); where != reads.end();) {
      const auto next = std::next(where);
      find_refused(where->second.header, where->second.hashes.as<std::uint64_t>());
      if (!refused_.empty()) {
        release(job->deferred.take(where), released_);
      }
      where = next;
    }
  }
}

void Service::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  const std::lock_guard arcs(arcs_mutex_);
  control([&] {
    serve_ranges(ranges);
    epoch_ = epoch;
    for (const auto& job : jobs_) {
      job->functions.clear();  // of other slots
    }
    refuse_deferred();  // now, not when their clock is reached
  });
}

// --- arcs that move ---------------------------------------------------------------------------------------------

void Service::take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to) {
  const std::lock_guard arcs(arcs_mutex_);
  control([&] {
    const auto find_arc = [&](const SlotRange& range) {
      return std::ranges::find_if(arcs_, [&](const auto& arc) {
        return arc != nullptr && arc->first_slot() == range.first && arc->end_slot() == range.end;
      });
    };
    for (const SlotRange& range : ranges) {
      SHOAL_CHECK(find_arc(range) != arcs_.end(), "no arc here has the slots [" +
                                                      std::to_string(range.first) + ", " +
                                                      std::to_string(range.end) + ")");
      SHOAL_CHECK(std::ranges::count_if(
                      ranges, [&](const SlotRange& other) { return other.first == range.first; }) == 1,
                  "the slots [" + std::to_string(range.first) + ", " + std::to_string(range.end) +
                      ") are named twice");
    }
    to.reserve(to.size() + ranges.size());
    for (const SlotRange& range : ranges) {
      const Arc& arc = **find_arc(range);
      for (const auto& [id, table] : arc.tables()) {
        for (const auto& session : sessions_) {
          if (session->holds(*table.shard) || (table.loading != nullptr && session->holds(*table.loading))) {
            session->cancel();
          }
        }
      }
    }
    // Nothing below fails: arcs that have left are in nobody's hands until this call returns.
    for (const SlotRange& range : ranges) {
      const Arc& arc = **find_arc(range);
      cancel_copies(&arc);
      std::erase_if(served_, [&](const Served& served) { return served.arc == &arc; });
      to.push_back(std::move(*find_arc(range)));
    }
    std::erase(arcs_, nullptr);
    index_arcs();
    refuse_deferred();
  });
}

void Service::adopt(std::span<std::unique_ptr<Arc>> arcs) {
  const std::lock_guard arcs_lock(arcs_mutex_);
  control([&] {
    std::map<std::uint32_t, std::unique_ptr<Table>> tables;
    std::vector<std::unique_ptr<JobRequests>> named;
    std::vector<bool> present(slots_.count());
    for (const auto& arc : arcs) {
      SHOAL_CHECK(arc->slots().count() == slots_.count(),
                  "an arc of " + std::to_string(arc->slots().count()) + " slots does not fit a service of " +
                      std::to_string(slots_.count()));
      for (std::size_t s = arc->first_slot(); s < arc->end_slot(); ++s) {
        SHOAL_CHECK(arc_of(s) == nullptr && !present[s], "slot " + std::to_string(s) + " has an arc already");
        present[s] = true;
      }
      for (const auto& [id, table] : arc->tables()) {
        const TableSpec& spec = table.shard->spec();
        const auto known = tables_.find(id);
        const auto& there = known != tables_.end() ? known->second : tables[id];
        if (there == nullptr) {
          tables[id] = std::make_unique<Table>(spec);
        } else {
          SHOAL_CHECK(encode(there->spec) == encode(spec),
                      "table " + std::to_string(id) + " has another description in an arc");
        }
      }
      for (const auto& job : std::span(arc->jobs()).subspan(1)) {
        if (find_job(job->number) == nullptr && std::ranges::find(named, job->number, [](const auto& one) {
                                                  return one->number;
                                                }) == named.end()) {
          named.push_back(make_requests(job->number));
        }
      }
    }
    std::unique_ptr<JobRequests> started;  // the default job, if none is here yet
    const auto is_started = [](const auto& arc) { return arc->jobs().front()->number != kDefaultJob; };
    if (const auto arc = std::ranges::find_if(arcs, is_started);
        arc != arcs.end() && jobs_.front()->number == kDefaultJob) {
      started = make_requests((*arc)->jobs().front()->number);
    }
    jobs_.reserve(jobs_.size() + named.size());
    arcs_.reserve(arcs_.size() + arcs.size());
    slices_.reserve(arcs_.size() + arcs.size());
    // Nothing below fails.
    tables_.merge(tables);
    for (auto& arc : arcs) {
      arc->move_to(workspace_, disposal_);
      arcs_.push_back(std::move(arc));
    }
    index_arcs();
    if (started != nullptr) {
      replace_default_job(std::move(started));
    }
    has_begun_ |= !named.empty();
    std::ranges::move(named, std::back_inserter(jobs_));
  });
}

const Arc& Service::find_arc(const SlotRange& range) const {
  const auto arc = std::ranges::find_if(arcs_, [&](const auto& one) {
    return one->first_slot() == range.first && one->end_slot() == range.end;
  });
  SHOAL_CHECK(arc != arcs_.end(), "no arc here has the slots [" + std::to_string(range.first) + ", " +
                                      std::to_string(range.end) + ")");
  return **arc;
}

std::shared_ptr<ArcCopy> Service::begin_copy(const SlotRange& range) {
  const std::lock_guard lock(mutex_);
  auto copy = std::make_shared<ArcCopy>(find_arc(range));
  std::erase_if(copies_, [](const auto& one) { return one.expired(); });
  copies_.push_back(copy);
  return copy;
}

std::vector<std::vector<std::byte>> Service::save_arc(const SlotRange& range) const {
  const std::lock_guard lock(mutex_);
  return find_arc(range).save();
}

void Service::cancel_copies(const Arc* arc) noexcept {
  for (const auto& one : copies_) {
    if (const auto copy = one.lock();
        copy != nullptr && (arc == nullptr || copy->range().first == arc->first_slot())) {
      copy->cancel();
    }
  }
}

void Service::discard(std::vector<std::unique_ptr<Arc>> arcs) {
  const std::lock_guard lock(mutex_);
  for (auto& arc : arcs) {
    arc->move_to(workspace_, disposal_);
    while (!arc->tables().empty()) {
      arc->drop_table(arc->tables().begin()->first);
    }
  }
}

// --- jobs and workers -------------------------------------------------------------------------------------------

std::unique_ptr<Service::JobRequests> Service::make_requests(std::uint32_t job) {
  auto requests = std::make_unique<JobRequests>();
  requests->number = job;
  return requests;
}

void Service::replace_default_job(std::unique_ptr<JobRequests> requests) {
  has_begun_ = true;
  drop_requests(*jobs_.front());
  key_lists_.clear();
  jobs_.front() = std::move(requests);
}

void Service::begin_job(std::uint32_t job, bool is_named) {
  has_begun_ = true;
  if (find_job(job) != nullptr) {
    return;
  }
  if (is_named) {
    jobs_.push_back(make_requests(job));
  } else {
    replace_default_job(make_requests(job));
  }
}

void Service::drop_requests(JobRequests& job) {
  job.deferred.clear();
  cancel_sessions(job.number);
}

void Service::start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean,
                        std::uint32_t before, bool is_named) {
  SHOAL_CHECK(job != kDefaultJob, "a job's number is not 0");
  control([&] {
    for (const auto& arc : arcs_) {
      if (arc->find_job(job) == nullptr) {
        arc->start_job(job, mode, staleness, mean, before, is_named);
      }
    }
    begin_job(job, is_named);
  });
}

void Service::end_job(std::uint32_t job) {
  control([&] {
    const auto ended = std::ranges::find(jobs_, job, [](const auto& one) { return one->number; });
    if (ended == jobs_.begin() || ended == jobs_.end()) {
      return;
    }
    drop_requests(**ended);
    for (const auto& arc : arcs_) {
      arc->end_job(job);
    }
    jobs_.erase(ended);
  });
}

void Service::forget_worker(const WorkerId& worker) {
  JobRequests* const job = find_job(worker.job);
  if (job == nullptr) {
    return;
  }
  const std::uint32_t rank = worker.rank;
  auto& reads = job->deferred.reads();
  for (auto where = reads.begin(); where != reads.end();) {
    const auto next = std::next(where);
    if (where->second.header.worker == rank) {
      const DeferredReads::Read read = job->deferred.take(where);
      try {
        send({read.peer, read.header, {}, {}, {}, {}, released_}, Status::kFenced);
      } catch (const std::bad_alloc&) {
        // Its next request is refused.
      }
    }
    where = next;
  }
  cancel_sessions(worker.job, rank);
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

void Service::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock, std::uint32_t job) {
  control([&] {
    const WorkerId worker{.job = number_of(job), .rank = rank};
    for (const auto& arc : arcs_) {
      arc->check_admit(worker, incarnation, clock);
    }
    if (std::ranges::any_of(arcs_, [&](const auto& arc) { return arc->replaces(worker, incarnation); })) {
      forget_worker(worker);
    }
    for (const auto& arc : arcs_) {
      metrics_.dropped_pushes += arc->admit(worker, incarnation, clock);
    }
  });
}

LastTick Service::fence(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job) {
  LastTick last;
  control([&] {
    const WorkerId worker{.job = number_of(job), .rank = rank};
    if (std::ranges::any_of(arcs_, [&](const auto& arc) { return arc->serves(worker, incarnation); })) {
      forget_worker(worker);  // a sweep that waits for its clock would act after the fence
    }
    for (const auto& arc : arcs_) {
      LastTick here = arc->fence(worker, incarnation);
      if (here.clock >= last.clock) {
        last = std::move(here);
      }
    }
  });
  return last;
}

std::uint32_t Service::dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last,
                               std::uint32_t job) {
  std::uint32_t greatest = 0;
  control([&] {
    const WorkerId worker{.job = number_of(job), .rank = rank};
    if (std::ranges::any_of(arcs_, [&](const auto& arc) { return arc->serves(worker, incarnation); })) {
      forget_worker(worker);
    }
    for (const auto& arc : arcs_) {
      metrics_.dropped_pushes += arc->dismiss(worker, incarnation, last);
      const JobState* const its = arc->find_job(worker.job);
      greatest = its == nullptr ? greatest : std::max(greatest, its->clocks.greatest());
    }
  });
  return greatest;
}

std::uint32_t Service::hold(std::uint32_t job) {
  const std::lock_guard lock(mutex_);
  std::uint32_t greatest = 0;
  for (const auto& arc : arcs_) {
    greatest = std::max(greatest, arc->hold(number_of(job)));
  }
  return greatest;
}

void Service::resume(std::uint32_t job) {
  control([&] {
    for (const auto& arc : arcs_) {
      arc->resume(number_of(job));
    }
  });
}

void Service::set_memory(std::uint64_t slot_bytes) {
  const std::lock_guard arcs(arcs_mutex_);
  const std::lock_guard lock(mutex_);
  if (slot_bytes_ == slot_bytes) {
    return;
  }
  SHOAL_CHECK(tables_.empty(), "there are tables already: set the memory budget before adding tables");
  Budget::check_share(slot_bytes);
  for (const auto& arc : arcs_) {
    arc->set_memory(slot_bytes);
  }
  slot_bytes_ = slot_bytes;
  limit_waiting();
}

void Service::add_table(std::uint32_t id, const TableSpec& spec) {
  const std::lock_guard arcs(arcs_mutex_);
  {
    const std::lock_guard lock(mutex_);
    const auto known = tables_.find(id);
    SHOAL_CHECK(known == tables_.end() || encode(known->second->spec) == encode(spec),
                "there is a table " + std::to_string(id) + " already: drop it first");
  }
  // Without the mutex, which would delay requests.
  auto table = std::make_unique<Table>(spec);
  std::vector<std::pair<Arc*, std::shared_ptr<Shard>>> shards;
  for (const auto& arc : arcs_) {
    if (arc->find(id) == nullptr) {
      shards.emplace_back(arc.get(), arc->make_shard(spec));
    }
  }
  const std::lock_guard lock(mutex_);
  tables_.try_emplace(id, std::move(table));
  for (auto& [arc, shard] : shards) {
    arc->add_table(id, std::move(shard));
  }
  compare_arcs();
}

void Service::drop_table(std::uint32_t id) {
  const std::lock_guard arcs(arcs_mutex_);
  control([&] {
    const auto dropped = tables_.extract(id);
    for (const auto& arc : arcs_) {
      if (arc->find(id) != nullptr) {
        arc->drop_table(id);
      }
    }
    for (const auto& job : jobs_) {
      job->views.erase(id);
      auto& reads = job->deferred.reads();
      for (auto where = reads.begin(); where != reads.end();) {
        const auto next = std::next(where);
        if (where->second.header.table == id && where->second.header.op != wire::Op::kSaveBegin) {
          release(job->deferred.take(where), released_);
        }
        where = next;
      }
    }
  });
}

std::vector<std::uint32_t> Service::tables() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> ids;
  for (const auto& [id, table] : tables_) {
    ids.push_back(id);
  }
  return ids;
}

std::unique_ptr<Shard> Service::snapshot(std::uint32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto table = tables_.find(id);
  SHOAL_CHECK(table != tables_.end() && table->second->is_everywhere,
              "there is no table " + std::to_string(id));
  auto copy = std::make_unique<Shard>(table->second->spec, slots_, workspace_.pool);
  std::vector<std::byte> section;
  for (const auto& arc : arcs_) {
    const Shard& shard = *arc->find(id)->shard;
    for (std::size_t s = arc->first_slot(); s < arc->end_slot(); ++s) {
      const Slot slot{static_cast<std::uint32_t>(s)};
      const std::size_t rows = shard.section(slot, section);
      copy->restore(rows, section);
      shard.filter(slot, section);
      copy->restore_filter(slots_, slot, section);
    }
    copy->set_step(std::max(copy->step(), shard.step()));
    copy->set_clock(std::max(copy->table_clock(0), shard.table_clock(0)), 0);
  }
  return copy;
}

}  // namespace shoal
