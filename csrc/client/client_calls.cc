// Client: the calls of caches, and calls that are settled.

#include <algorithm>
#include <bit>
#include <utility>

#include "client/client.h"

namespace shoal::client {

namespace {

// Whether the caller need not wait: of pushes, ticks, and functions of a user that change rows.
bool may_be_dropped(const Call& call) {
  const auto* const all = std::get_if<OfAll>(&call.what);
  return call.op == wire::Op::kPush || call.op == wire::Op::kTick ||
         (all != nullptr && all->is_user_function && all->is_write);
}

}  // namespace

// --- caches -------------------------------------------------------------------------------------------------------

CallPtr Client::submit_rows(wire::Op op, std::uint32_t table, Keyed what, Terms terms) {
  const std::uint64_t bytes = what.hashes.size_bytes() + what.values.size() + what.out.size();
  return start(op, table, what, std::move(terms), bytes);
}

CallPtr Client::compose(wire::Op op, std::uint32_t table, bool is_traced) {
  const Seconds now = steady_now();
  return begun(requests_.compose(op, table, clock(), now, is_traced), 0, now);
}

void Client::complete(const CallPtr& composed, std::optional<Failure> failure) {
  requests_.complete(composed, steady_now(), std::move(failure));
}

CachedRows& Client::add_cache(std::unique_ptr<RowCache> cache, CachedRowsOptions options) {
  const MutexLock lock(mutex_);
  Submitter& calls = *this;
  return *caches_.emplace_back(std::make_unique<CachedRows>(calls, std::move(cache), std::move(options)));
}

void Client::flush_caches() {
  use([this] {
    mutex_.assert_held();
    std::ranges::for_each(caches_, [](const auto& rows) { rows->flush(); });
  });
}

void Client::forget_rows() {
  use([this] {
    mutex_.assert_held();
    std::ranges::for_each(caches_, [](const auto& rows) { rows->forget(); });
  });
}

// --- settled calls ------------------------------------------------------------------------------------------------

void Client::account() {
  while (requests_.has_settled()) {
    for (const CallPtr& call : requests_.take_settled()) {
      account(call);
    }
    if (requests_.has_outgoing()) {
      send();  // what caches have submitted
    }
  }
}

void Client::account(const CallPtr& call) {
  if (pending_.erase(call->serial) != 0) {
    counts_.bytes_held -= call->held_bytes;
    note_room();
  }
  if (call->observer != nullptr) {
    call->observer->settled(call);
  }
  // Of a composed call, those of which it is made are accounted for.
  if (!call->is_composed()) {
    const Seconds seconds = std::max(0.0, call->settled_at - call->begun_at);
    CallDurations& durations = durations_[call->op];
    durations.seconds += seconds;
    ++durations.counts.at(
        static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(seconds * 1e9) + 1)) - 1);
    if (call->failure.has_value()) {
      failed_.push_back(call);
      if (may_be_dropped(*call)) {
        unobserved_.push_back(call);
        has_unobserved_.store(true, std::memory_order_relaxed);
      }
      wake_background();
    }
  }
  if (call->trace != nullptr) {
    traced_.push_back(call);
  }
  if (to_notice_.erase(call.get()) != 0) {
    noticed_.push_back(call);
    wake_background();
  }
  note_reports();
}

std::vector<CallPtr> Client::take_noticed() {
  const MutexLock lock(mutex_);
  return std::exchange(noticed_, {});
}

std::vector<CallPtr> Client::take_traced() {
  const MutexLock lock(mutex_);
  std::vector<CallPtr> all = std::exchange(traced_, {});
  note_reports();
  return all;
}

std::vector<CallPtr> Client::take_failed() {
  const MutexLock lock(mutex_);
  std::vector<CallPtr> all = std::exchange(failed_, {});
  note_reports();
  return all;
}

std::vector<CallPtr> Client::take_unobserved() {
  const MutexLock lock(mutex_);
  has_unobserved_.store(false, std::memory_order_relaxed);
  return std::exchange(unobserved_, {});
}

void Client::observed(const Call& call) {
  const MutexLock lock(mutex_);
  const auto* const composed = std::get_if<Composed>(&call.what);
  std::erase_if(unobserved_, [&](const CallPtr& one) {
    return one.get() == &call ||
           (composed != nullptr && std::ranges::find(composed->calls, one) != composed->calls.end());
  });
  has_unobserved_.store(!unobserved_.empty(), std::memory_order_relaxed);
}

}  // namespace shoal::client
