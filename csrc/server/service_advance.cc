// Service: completed clocks, and the reads that they release.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

bool Service::is_complete(std::uint32_t job, std::uint32_t clock) const noexcept {
  return std::ranges::all_of(arcs_, [&](const auto& arc) {
    const JobState* const its = arc->find_job(job);
    return its != nullptr && its->is_complete(clock);
  });
}

void Service::advance(ReplyQueue& out, std::uint64_t received_ns) noexcept {
  bool failed = false;
  for (bool moves = true; moves;) {
    // Before the next step: a read at this clock must not see it.
    for (const auto& job : jobs_) {
      DeferredReads& deferred = job->deferred;
      while (!deferred.empty() && is_complete(job->number, deferred.next_clock())) {
        release(deferred.pop(), out);
      }
    }
    moves = false;
    for (const auto& arc : arcs_) {
      for (std::size_t n = 0; n < arc->jobs().size(); ++n) {
        const JobState& job = *arc->jobs()[n];
        const JobRequests* const requests = job.has_step() ? find_job(job.number) : nullptr;
        const bool is_awaited = requests != nullptr && !requests->deferred.empty() &&
                                requests->deferred.next_clock() <= job.applied;
        if (!job.has_step() || is_awaited) {
          continue;
        }
        try {
          in_shard(received_ns, [&] { arc->step(n); });
          moves = true;
        } catch (const std::exception&) {
          ++metrics_.failed_steps;  // the step stays pending, and the next message retries it
          failed = true;
        }
      }
    }
    moves = moves && !failed;
  }
}

void Service::release(DeferredReads::Read&& read, ReplyQueue& out) noexcept {
  const DeferredReads::Read mine = std::move(read);
  const Call call{mine.peer, mine.header, mine.hashes.as<std::uint64_t>(),
                  {},        {},          mine.parameters.bytes(),
                  out,       nullptr,     mine.received_ns};
  const std::uint64_t others_ns = std::exchange(shard_ns_, 0);  // of the request that releases it
  std::optional<ReleasedWrite> write;                           // if it is one
  last_status_ = wire::Status::kInternal;
  try {
    if (tracks_ && !is_read(call.header)) {
      // What its record takes comes first: what was executed must not be missing in the log.
      released_writes_.reserve(released_writes_.size() + 1);
      std::vector<std::byte> parameters(call.bytes.begin(), call.bytes.end());
      write = ReleasedWrite{.header = call.header,
                            .parameters = std::move(parameters),
                            .executed = std::exchange(executed_, {})};
    }
    execute_released(call);
  } catch (const std::exception& error) {
    fail(call, error);
  }
  shard_ns_ = others_ns;
  if (write) {
    std::swap(write->executed, executed_);
    if (!write->executed.arcs.empty()) {
      write->executed.status = last_status_;
      released_writes_.push_back(std::move(*write));
    }
  }
}

void Service::execute_released(const Call& call) {
  if (call.header.op == wire::Op::kSaveBegin) {
    return save_begin(call);
  }
  Table* const table = find(call.header.table);
  find_refused(call.header, call.hashes);
  if (table == nullptr) {
    send(call, wire::Status::kNoTable);
  } else if (!refused_.empty()) {
    send_done(call, refusal(call.out));
  } else if ((call.header.op != wire::Op::kReduce && call.header.op != wire::Op::kSweep) ||
             check_epoch(call)) {
    if (is_read(call.header)) {
      answer(call, *table);
    } else {
      sweep(call);
    }
  }
}

}  // namespace shoal
