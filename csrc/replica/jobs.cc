#include "replica/jobs.h"

namespace shoal {

std::uint32_t Jobs::incarnation(const WorkerId& worker) const noexcept {
  const JobState* const job = find(worker.job);
  if (job == nullptr || worker.rank >= job->clocks.workers().size()) {
    return 0;
  }
  const Clocks::Worker& known = job->clocks.workers()[worker.rank];
  return known.admitted ? known.incarnation : 0;
}

void Jobs::check_admit(const WorkerId& worker, std::uint32_t incarnation, std::uint32_t clock) const {
  const auto [number, rank] = worker;
  const JobState* const job = find(number);
  SHOAL_CHECK(job != nullptr, "there is no job " + std::to_string(number) + " to admit rank " +
                                  std::to_string(rank) + " to: start it first");
  const auto& workers = job->clocks.workers();
  const bool known = rank < workers.size() && workers[rank].incarnation >= incarnation;
  SHOAL_CHECK(known || job->mode != Mode::kBsp || clock >= job->applied,
              "rank " + std::to_string(rank) + " cannot join at clock " + std::to_string(clock) +
                  ": the clocks before " + std::to_string(job->applied) + " are applied; hold() first");
}

DedupWindow& Jobs::window(const WorkerId& worker) {
  auto& windows = get(worker.job).dedup;
  if (worker.rank >= windows.size()) {
    windows.resize(worker.rank + std::size_t{1});
  }
  if (windows[worker.rank] == nullptr) {
    windows[worker.rank] = std::make_unique<DedupWindow>(slots_.first, slots_.end);
  }
  return *windows[worker.rank];
}

DedupWindow* Jobs::find_window(const WorkerId& worker) const noexcept {
  const JobState* const job = find(worker.job);
  return job != nullptr && worker.rank < job->dedup.size() ? job->dedup[worker.rank].get() : nullptr;
}

}  // namespace shoal
