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

void Service::set_map(std::uint32_t epoch, std::size_t first, std::size_t end) {
  SHOAL_CHECK(first <= end && end <= slots_.count(), "there are no slots [" + std::to_string(first) + ", " +
                                                         std::to_string(end) + ") of " +
                                                         std::to_string(slots_.count()));
  control([&] {
    epoch_ = epoch;
    first_slot_ = first;
    end_slot_ = end;
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
    if (job == job_) {
      return;
    }
    job_ = job;
    mode_ = mode == Mode::kSsp && staleness == 0 ? Mode::kBsp : mode;
    staleness_ = staleness;
    mean_ = mean;
    clocks_.clear();
    applied_ = 0;
    dedup_.clear();
    tick_tables_.clear();
    pending_.clear();
    deferred_.clear();
    key_lists_.clear();
    cancel_sessions(std::nullopt);
    for (auto& [id, table] : tables_) {
      disposal_.add(std::move(table->loading));
      table->views.clear();
      table->full.clear();
      table->shard->set_clock(table->shard->table_clock(before), 0);
    }
  });
}

void Service::forget_worker(std::uint32_t rank) {
  metrics_.dropped_pushes += pending_.drop(rank, clocks_.clock(rank));
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
  for (auto& [id, table] : tables_) {
    if (table->loader == rank) {
      disposal_.add(std::move(table->loading));
    }
    if (rank < table->views.size()) {
      table->views[rank] = {};
    }
  }
}

void Service::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock) {
  control([&] {
    const auto& workers = clocks_.workers();
    const bool known = rank < workers.size() && workers[rank].incarnation >= incarnation;
    SHOAL_CHECK(known || mode_ != Mode::kBsp || clock >= applied_,
                "rank " + std::to_string(rank) + " cannot join at clock " + std::to_string(clock) +
                    ": the clocks before " + std::to_string(applied_) + " are applied; hold() first");
    if (!known && rank < workers.size() && workers[rank].admitted) {
      forget_worker(rank);
    }
    if (clocks_.admit(rank, incarnation, clock) && rank < dedup_.size()) {
      dedup_[rank].reset();
    }
  });
}

LastTick Service::fence(std::uint32_t rank, std::uint32_t incarnation) {
  const std::lock_guard lock(mutex_);
  if (!clocks_.fence(rank, incarnation)) {
    return {};
  }
  return {.clock = clocks_.clock(rank),
          .tables = rank < tick_tables_.size() ? tick_tables_[rank] : std::vector<std::uint32_t>()};
}

std::uint32_t Service::dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last) {
  std::uint32_t greatest = 0;
  control([&] {
    const auto& workers = clocks_.workers();
    if (rank < workers.size() && workers[rank].admitted && workers[rank].incarnation <= incarnation) {
      // A client ends a clock when every endpoint has ended the previous one, so this is at most one tick. A client that
      // behaves otherwise has only its last tick's tables.
      while (workers[rank].incarnation == incarnation && clocks_.clock(rank) < last.clock) {
        end_clock(rank, clocks_.clock(rank) + 1 == last.clock ? std::span<const std::uint32_t>(last.tables)
                                                              : std::span<const std::uint32_t>());
      }
      forget_worker(rank);
    }
    clocks_.dismiss(rank, incarnation);
    greatest = clocks_.greatest();
  });
  return greatest;
}

std::uint32_t Service::hold() {
  const std::lock_guard lock(mutex_);
  return clocks_.hold();
}

void Service::resume() {
  control([&] { clocks_.resume(); });
}

void Service::set_memory(std::uint64_t slot_bytes) {
  auto budget = std::make_unique<Budget>(slots_, slot_bytes * slots_.count());
  const std::lock_guard lock(mutex_);
  SHOAL_CHECK(tables_.empty(), "there are tables already: set the memory budget before adding tables");
  budget_ = std::move(budget);
  const std::uint64_t quarter = slot_bytes / 4 * (end_slot_ - first_slot_);
  const std::size_t most = std::max<std::uint64_t>(quarter, kMinWaitingBytes);
  limits_.pending_bytes = std::min(limits_.pending_bytes, most);
  limits_.deferred_bytes = std::min(limits_.deferred_bytes, most);
}

void Service::add_table(std::uint32_t id, const TableSpec& spec) {
  auto table =
      std::make_unique<Table>(std::make_shared<Shard>(spec, slots_, pool_, Locks::kOne, budget_.get()));
  const std::lock_guard lock(mutex_);
  const bool fresh = tables_.try_emplace(id, std::move(table)).second;
  SHOAL_CHECK(fresh, "there is a table " + std::to_string(id) + " already: drop it first");
}

void Service::drop_table(std::uint32_t id) {
  control([&] {
    const auto dropped = tables_.extract(id);
    SHOAL_CHECK(!dropped.empty(), "there is no table " + std::to_string(id));
    disposal_.add(std::move(dropped.mapped()->shard));
    disposal_.add(std::move(dropped.mapped()->loading));
    pending_.drop_table(id);
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
  const Shard& shard = *table->second->shard;
  auto copy = std::make_unique<Shard>(shard.spec(), slots_, pool_);
  std::vector<std::byte> section;
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    const std::size_t rows = shard.section(Slot{static_cast<std::uint32_t>(s)}, section);
    copy->restore(rows, section);
    shard.filter(Slot{static_cast<std::uint32_t>(s)}, section);
    copy->restore_filter(slots_, Slot{static_cast<std::uint32_t>(s)}, section);
  }
  copy->set_step(shard.step());
  copy->set_clock(shard.table_clock(0), 0);
  return copy;
}

}  // namespace shoal
