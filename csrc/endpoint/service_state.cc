#include "endpoint/service_state.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace shoal {

using wire::Status;

ServiceState::ServiceState(Slots of, const ServiceLimits& given)
    : slots(of),
      given_limits(given),
      limits(given),
      arcs(of, workspace, disposal, given.tier),
      key_lists(given.key_list_bytes) {
  cut.refused.reserve(slots.count());
  jobs.push_back(std::make_unique<JobRequests>(kDefaultJob));
}

ServedTable* ServiceState::find_table(std::uint32_t id) noexcept {
  const auto table = tables.find(id);
  return table == tables.end() || !table->second->is_everywhere ? nullptr : table->second.get();
}

JobRequests* ServiceState::find_job(std::uint32_t number) noexcept {
  const auto found = std::ranges::find(jobs, number, [](const auto& job) { return job->number; });
  return found == jobs.end() ? nullptr : found->get();
}

JobRequests& ServiceState::job_of(const RequestContext& request) noexcept {
  JobRequests* const found = find_job(request.header.job);
  SHOAL_DCHECK(found != nullptr);
  return *found;
}

PostponedCalls& ServiceState::postponed(const RequestContext& request) {
  auto& calls = job_of(request).postponed;
  const std::uint32_t rank = request.header.worker;
  if (rank >= calls.size()) {
    calls.resize(rank + std::size_t{1});
  }
  if (calls[rank] == nullptr) {
    calls[rank] = std::make_unique<PostponedCalls>();
  }
  return *calls[rank];
}

TableView& ServiceState::view(const RequestContext& request) {
  auto& views = job_of(request).views[request.header.table];
  const std::uint32_t rank = request.header.worker;
  if (rank >= views.size()) {
    views.resize(rank + std::size_t{1});
  }
  return views[rank];
}

StateRoom ServiceState::make_room(std::size_t num_arcs, const std::map<std::uint32_t, TableSpec>& more_tables,
                                  std::span<const std::uint32_t> more_jobs) {
  StateRoom room;
  for (const auto& [id, spec] : more_tables) {
    if (!tables.contains(id)) {
      room.tables.emplace(id, std::make_unique<ServedTable>(spec));
    }
  }
  for (const std::uint32_t number : more_jobs) {
    if (find_job(number) == nullptr) {
      room.jobs.push_back(std::make_unique<JobRequests>(number));
    }
  }
  jobs.reserve(jobs.size() + room.jobs.size());
  cut.slices.reserve(num_arcs);
  return room;
}

void ServiceState::follow_arcs(StateRoom room) noexcept {
  tables.merge(room.tables);
  std::erase_if(tables, [&](const auto& table) { return !arcs.tables().contains(table.first); });
  for (const auto& [id, table] : tables) {
    table->is_everywhere = arcs.has_table(id);
  }
  for (auto& begun : room.jobs) {
    if (begun->number == arcs.jobs().front()) {
      saves.cancel({.job = jobs.front()->number});
      key_lists.clear();
      jobs.front() = std::move(begun);
    } else if (arcs.has_job(begun->number)) {
      jobs.push_back(std::move(begun));  // there is room
    }
  }
  std::erase_if(jobs, [&](const auto& job) {
    const bool has_ended = !arcs.has_job(job->number);
    if (has_ended) {
      saves.cancel({.job = job->number});
    }
    return has_ended;
  });
  for (const auto& job : jobs) {
    const JobState* const first =
        arcs.arcs().empty() ? nullptr : arcs.arcs().front()->jobs().find(job->number);
    job->arcs_agree = std::ranges::all_of(arcs.arcs(), [&](const auto& arc) {
      const JobState* const state = arc->jobs().find(job->number);
      return state != nullptr && first != nullptr && state->number == job->number &&
             state->agrees_with(*first);
    });
  }
  limit_waiting();
}

void ServiceState::limit_waiting() noexcept {
  constexpr std::size_t kMinWaitingBytes = 64 * MiB;
  limits = given_limits;
  if (const auto budget = arcs.budget_bytes()) {
    const std::size_t limit = std::max<std::uint64_t>(*budget / 4, kMinWaitingBytes);
    limits.pending_bytes = std::min(limits.pending_bytes, limit);
    limits.deferred_bytes = std::min(limits.deferred_bytes, limit);
  }
}

// --- outcomes ---------------------------------------------------------------------------------------------

Answer done(PooledBuffer refused, std::uint32_t aux) {
  const auto count = static_cast<std::uint32_t>(refused.size() / sizeof(std::uint16_t));
  if (count == 0) {
    return {.header = {.status = Status::kOk, .aux = aux}};
  }
  return {.header = {.status = Status::kWrongEpoch, .count = count, .aux = aux},
          .frames = 1,
          .first = std::move(refused)};
}

PooledBuffer refused_slots(const Cut& cut, ReplyQueue& out) {
  PooledBuffer block = out.acquire(cut.refused.size() * sizeof(std::uint16_t));
  std::ranges::copy(cut.refused, block.as<std::uint16_t>().begin());
  return block;
}

Answer wrong_epoch() { return {.header = {.status = Status::kWrongEpoch}, .frames = 1}; }

Answer words_answer(std::span<const std::uint64_t> words, ReplyQueue& out) {
  PooledBuffer block = out.acquire(words.size_bytes());
  std::ranges::copy(words, block.as<std::uint64_t>().begin());
  return {
      .header = {.count = static_cast<std::uint32_t>(words.size())}, .frames = 1, .first = std::move(block)};
}

Answer numbers_answer(std::span<const double> numbers, std::uint32_t aux, ReplyQueue& out) {
  PooledBuffer block = out.acquire(numbers.size_bytes());
  std::ranges::copy(numbers, block.as<double>().begin());
  return {.header = {.dtype = wire::Dtype::kFloat64,
                     .count = static_cast<std::uint32_t>(numbers.size()),
                     .aux = aux},
          .frames = 1,
          .first = std::move(block)};
}

std::optional<Refusal> check_whole(const ServiceState& state, const RequestContext& request,
                                   const ServedTable& table) {
  if (!request.is_whole()) {
    return std::nullopt;
  }
  if (!table.spec.optimizer.adds_up()) {
    return bad_request("what steps of " + table.spec.optimizer.name() +
                       " change in copies of rows does not add up: pull weights and push gradients");
  }
  if (state.arcs.mode(request.header.job) == Mode::kBsp) {
    return bad_request("a job under BSP pulls weights and pushes gradients, not whole rows");
  }
  return std::nullopt;
}

std::optional<Refusal> check_dtype(const RequestContext& request, const ServedTable& table) {
  if (request.header.dtype == wire::Dtype::kFloat32 ||
      table.spec.optimizer.elements() == Elements::kFloat32) {
    return std::nullopt;
  }
  return bad_request("table " + std::to_string(request.header.table) + " has int64, got " +
                     std::string(wire::name(request.header.dtype)) +
                     " as the type of its rows: an integer is the bits of two float32, so send and request "
                     "float32");
}

Refusal bad_request(std::string text) { return {.status = Status::kBadRequest, .text = std::move(text)}; }

}  // namespace shoal
