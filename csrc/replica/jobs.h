// Jobs: the jobs of an arc, and which calls of their workers the arc has executed. The default job comes
// first, the others follow in the order in which they began; each has clocks of its own
// (replica/job_state.h).
//
// Invariants
//   I1  There is a default job, and the numbers of the jobs differ.
//   I2  A worker has a window (replica/dedup_window.h) from its first call on.
//
// Threads: none of its own; one owner.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "replica/dedup_window.h"
#include "replica/job_state.h"
#include "replica/slot_range.h"
#include "replica/worker_id.h"

namespace shoal {

class Jobs {
 public:
  // Of an arc of these slots.
  explicit Jobs(const SlotRange& slots) : slots_(slots) { jobs_.push_back(std::make_unique<JobState>()); }

  const std::vector<std::unique_ptr<JobState>>& all() const noexcept { return jobs_; }
  JobState& first() const noexcept { return *jobs_.front(); }
  // Of this number; null: there is none. kDefaultJob means the default job.
  JobState* find(std::uint32_t number) const noexcept {
    const auto& first = jobs_.front();  // of most requests
    return number == kDefaultJob || number == first->number ? first.get() : find_named(number);
  }
  JobState* find_named(std::uint32_t number) const noexcept {
    const auto found = std::ranges::find(jobs_, number, [](const auto& job) { return job->number; });
    return found == jobs_.end() ? nullptr : found->get();
  }
  // std::invalid_argument: there is none.
  JobState& get(std::uint32_t number) const {
    JobState* const found = find(number);
    SHOAL_CHECK(found != nullptr, "there is no job " + std::to_string(number));
    return *found;
  }
  // A named job is added, any other one replaces the default job.
  void begin(std::unique_ptr<JobState> job) {
    job->is_named ? jobs_.push_back(std::move(job)) : static_cast<void>(jobs_.front() = std::move(job));
  }
  void end(const JobState& job) {
    std::erase_if(jobs_, [&](const auto& begun) { return begun.get() == &job; });
  }
  // The jobs of a copy, the default job first.
  void replace(std::vector<std::unique_ptr<JobState>> jobs) noexcept { jobs_ = std::move(jobs); }

  // --- workers --------------------------------------------------------------------------------------------

  // The incarnation of an admitted worker; 0: it is not admitted.
  std::uint32_t incarnation(const WorkerId& worker) const noexcept;
  // std::invalid_argument if the worker would miss applied clocks, or there is no such job.
  void check_admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock) const;
  DedupWindow& window(const WorkerId& worker);
  // Null: it has not called.
  DedupWindow* find_window(const WorkerId& worker) const noexcept;
  // Whether a call of the worker has been executed here, in any slot; or in this one.
  bool has_done(const WorkerId& worker, std::uint64_t sequence) const noexcept {
    DedupWindow* const window = find_window(worker);
    return window != nullptr && window->calls().contains(sequence);
  }
  bool has_done(const WorkerId& worker, std::uint64_t sequence, std::size_t slot) const noexcept {
    DedupWindow* const window = find_window(worker);
    return window != nullptr && window->slot(slot).contains(sequence);
  }

 private:
  SlotRange slots_;
  std::vector<std::unique_ptr<JobState>> jobs_;
};

}  // namespace shoal
