// Service: orders of the scheduler.

#include <algorithm>
#include <iterator>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

using wire::Status;

template <class Change>
void Service::control(const Change& change) {
  const std::lock_guard lock(mutex_);
  change();
  advance(released_);
  if (waker_ && !released_.replies().empty()) {
    waker_();
  }
}

void Service::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  waker_ = std::move(waker);
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
    SHOAL_CHECK(job() == 0, "arcs are made before the first job");
    fresh.push_back(std::make_unique<Arc>(slots_, range.first, range.end, workspace_, disposal_));
    Arc& arc = *fresh.back();
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
  std::ranges::sort(arcs_, {}, [](const auto& arc) { return arc->first_slot(); });
  for (const auto& arc : arcs_) {
    std::fill(arc_of_.begin() + static_cast<std::ptrdiff_t>(arc->first_slot()),
              arc_of_.begin() + static_cast<std::ptrdiff_t>(arc->end_slot()), arc.get());
  }
  served_ = std::move(served);
}

void Service::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  control([&] {
    serve_ranges(ranges);
    epoch_ = epoch;
    // Reads of slots that have moved away are refused now, not when their clock is reached.
    auto& reads = deferred_.reads();
    for (auto where = reads.begin(); where != reads.end();) {
      const auto next = std::next(where);
      find_refused(where->second.header, where->second.hashes.as<std::uint64_t>());
      if (!refused_.empty()) {
        release(deferred_.take(where), released_);
      }
      where = next;
    }
  });
}

void Service::start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean,
                        std::uint32_t before) {
  SHOAL_CHECK(job != 0, "a job's number is not 0");
  control([&] {
    if (job == this->job()) {
      return;
    }
    for (const auto& arc : arcs_) {
      arc->start_job(job, mode, staleness, mean, before);
    }
    postponed_.clear();
    deferred_.clear();
    key_lists_.clear();
    cancel_sessions(std::nullopt);
    for (auto& [id, table] : tables_) {
      table->views.clear();
    }
  });
}

void Service::forget_worker(std::uint32_t rank) {
  auto& reads = deferred_.reads();
  for (auto where = reads.begin(); where != reads.end();) {
    const auto next = std::next(where);
    if (where->second.header.worker == rank) {
      const DeferredReads::Read read = deferred_.take(where);
      try {
        send({read.peer, read.header, {}, {}, {}, {}, released_}, Status::kFenced);
      } catch (const std::bad_alloc&) {
        // Its next request is refused.
      }
    }
    where = next;
  }
  cancel_sessions(rank);
  if (rank < postponed_.size()) {
    postponed_[rank].reset();
  }
  for (auto& [id, table] : tables_) {
    if (rank < table->views.size()) {
      table->views[rank] = {};
    }
  }
}

void Service::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) {
  control([&] {
    for (const auto& arc : arcs_) {
      arc->check_admit(rank, incarnation, clock);
    }
    if (!arcs_.empty() && arcs_.front()->replaces(rank, incarnation)) {
      forget_worker(rank);
    }
    for (const auto& arc : arcs_) {
      metrics_.dropped_pushes += arc->admit(rank, incarnation, clock);
    }
  });
}

LastTick Service::fence(std::uint32_t rank, std::uint32_t incarnation) {
  const std::lock_guard lock(mutex_);
  LastTick last;
  for (const auto& arc : arcs_) {
    LastTick here = arc->fence(rank, incarnation);
    if (here.clock >= last.clock) {
      last = std::move(here);
    }
  }
  return last;
}

std::uint32_t Service::dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last) {
  std::uint32_t greatest = 0;
  control([&] {
    if (!arcs_.empty()) {
      const auto& workers = arcs_.front()->clocks().workers();
      if (rank < workers.size() && workers[rank].admitted && workers[rank].incarnation <= incarnation) {
        forget_worker(rank);
      }
    }
    for (const auto& arc : arcs_) {
      metrics_.dropped_pushes += arc->dismiss(rank, incarnation, last);
      greatest = std::max(greatest, arc->clocks().greatest());
    }
  });
  return greatest;
}

std::uint32_t Service::hold() {
  const std::lock_guard lock(mutex_);
  std::uint32_t greatest = 0;
  for (const auto& arc : arcs_) {
    greatest = std::max(greatest, arc->hold());
  }
  return greatest;
}

void Service::resume() {
  control([&] {
    for (const auto& arc : arcs_) {
      arc->resume();
    }
  });
}

void Service::set_memory(std::uint64_t slot_bytes) {
  const std::lock_guard lock(mutex_);
  SHOAL_CHECK(tables_.empty(), "there are tables already: set the memory budget before adding tables");
  for (const auto& arc : arcs_) {
    arc->set_memory(slot_bytes);
  }
  slot_bytes_ = slot_bytes;
  const std::uint64_t quarter = slot_bytes / 4 * served_slots();
  const std::size_t most = std::max<std::uint64_t>(quarter, kMinWaitingBytes);
  limits_.pending_bytes = std::min(limits_.pending_bytes, most);
  limits_.deferred_bytes = std::min(limits_.deferred_bytes, most);
}

void Service::add_table(std::uint32_t id, const TableSpec& spec) {
  // Not under the mutex, which would delay requests: arcs are neither made nor given a budget at the same time as tables.
  auto table = std::make_unique<Table>(spec);
  std::vector<std::shared_ptr<Shard>> shards;
  for (const auto& arc : arcs_) {
    shards.push_back(arc->make_shard(spec));
  }
  const std::lock_guard lock(mutex_);
  const bool fresh = tables_.try_emplace(id, std::move(table)).second;
  SHOAL_CHECK(fresh, "there is a table " + std::to_string(id) + " already: drop it first");
  for (std::size_t i = 0; i < arcs_.size(); ++i) {
    arcs_[i]->add_table(id, std::move(shards[i]));
  }
}

void Service::drop_table(std::uint32_t id) {
  control([&] {
    const auto dropped = tables_.extract(id);
    SHOAL_CHECK(!dropped.empty(), "there is no table " + std::to_string(id));
    for (const auto& arc : arcs_) {
      arc->drop_table(id);
    }
    auto& reads = deferred_.reads();
    for (auto where = reads.begin(); where != reads.end();) {
      const auto next = std::next(where);
      if (where->second.header.table == id && where->second.header.op != wire::Op::kSaveBegin) {
        release(deferred_.take(where), released_);
      }
      where = next;
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
  SHOAL_CHECK(table != tables_.end(), "there is no table " + std::to_string(id));
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
