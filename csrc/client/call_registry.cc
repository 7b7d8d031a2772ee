#include "client/call_registry.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>
#include <variant>

namespace shoal::client {

namespace {

// Whether the caller need not wait: of pushes, ticks, and functions of a user that change rows.
bool may_be_dropped(const Call& call) {
  const auto* const everywhere = std::get_if<OfAll>(&call.what);
  return call.op == wire::Op::kPush || call.op == wire::Op::kTick ||
         (everywhere != nullptr && everywhere->is_user_function && everywhere->is_write);
}

}  // namespace

void CallRegistry::begin(const CallPtr& call, std::uint64_t bytes) {
  if (!call->is_done()) {
    const MutexLock lock(mutex_);
    call->held_bytes = bytes;
    counts_.bytes_held += bytes;
    pending_.emplace(call->serial, call);
    note_room();
  }
}

void CallRegistry::count_keys(std::uint64_t given, std::uint64_t unique) {
  const MutexLock lock(mutex_);
  counts_.keys += given;
  counts_.unique_keys += unique;
}

bool CallRegistry::settle(const CallPtr& call) {
  const MutexLock lock(mutex_);
  if (pending_.erase(call->serial) != 0) {
    counts_.bytes_held -= call->held_bytes;
    note_room();
  }
  // Of a composed call, those of which it is made are counted.
  const bool has_failed = !call->is_composed() && call->failure.has_value();
  if (!call->is_composed()) {
    const Seconds seconds = std::max(0.0, call->settled_at - call->begun_at);
    CallDurations& durations = durations_[call->op];
    durations.seconds += seconds;
    ++durations.counts.at(
        static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(seconds * 1e9) + 1)) - 1);
  }
  if (has_failed) {
    failed_.push_back(call);
    if (may_be_dropped(*call)) {
      unobserved_.push_back(call);
      has_unobserved_.store(true, std::memory_order_relaxed);
    }
  }
  if (call->trace != nullptr) {
    traced_.push_back(call);
  }
  const bool is_noticed = awaited_.erase(call.get()) != 0;
  if (is_noticed) {
    noticed_.push_back(call);
  }
  note_reports();
  return has_failed || is_noticed;
}

bool CallRegistry::notice(const CallPtr& call) {
  const MutexLock lock(mutex_);
  if (call->is_done()) {
    return false;
  }
  awaited_.insert(call.get());
  return true;
}

bool CallRegistry::is_awaited() const {
  const MutexLock lock(mutex_);
  return !awaited_.empty();
}

bool CallRegistry::has_work(bool counts_traced) const {
  const MutexLock lock(mutex_);
  return !noticed_.empty() || !failed_.empty() || (counts_traced && !traced_.empty());
}

bool CallRegistry::are_settled(std::uint64_t last) const {
  const MutexLock lock(mutex_);
  return pending_.empty() || pending_.begin()->first > last;
}

bool CallRegistry::has_pending() const {
  const MutexLock lock(mutex_);
  return !pending_.empty();
}

std::uint64_t CallRegistry::last_pending() const {
  const MutexLock lock(mutex_);
  return pending_.empty() ? 0 : pending_.rbegin()->first;
}

std::size_t CallRegistry::count_pending(std::uint64_t last) const {
  const MutexLock lock(mutex_);
  return static_cast<std::size_t>(std::distance(pending_.begin(), pending_.upper_bound(last)));
}

std::vector<CallPtr> CallRegistry::take_noticed() {
  const MutexLock lock(mutex_);
  return std::exchange(noticed_, {});
}

std::vector<CallPtr> CallRegistry::take_traced() {
  const MutexLock lock(mutex_);
  std::vector<CallPtr> taken = std::exchange(traced_, {});
  note_reports();
  return taken;
}

std::vector<CallPtr> CallRegistry::take_failed() {
  const MutexLock lock(mutex_);
  std::vector<CallPtr> taken = std::exchange(failed_, {});
  note_reports();
  return taken;
}

std::vector<CallPtr> CallRegistry::take_unobserved() {
  const MutexLock lock(mutex_);
  has_unobserved_.store(false, std::memory_order_relaxed);
  return std::exchange(unobserved_, {});
}

void CallRegistry::observed(const Call& call) {
  const MutexLock lock(mutex_);
  const auto* const composed = std::get_if<Composed>(&call.what);
  std::erase_if(unobserved_, [&](const CallPtr& failed) {
    return failed.get() == &call ||
           (composed != nullptr && std::ranges::find(composed->calls, failed) != composed->calls.end());
  });
  has_unobserved_.store(!unobserved_.empty(), std::memory_order_relaxed);
}

CallCounts CallRegistry::counts() const {
  const MutexLock lock(mutex_);
  CallCounts now = counts_;
  now.under_way = pending_.size();
  return now;
}

std::map<wire::Op, CallDurations> CallRegistry::durations() const {
  const MutexLock lock(mutex_);
  return durations_;
}

void CallRegistry::note_reports() noexcept {
  has_reports_.store(!traced_.empty() || !failed_.empty(), std::memory_order_relaxed);
}

void CallRegistry::note_room() noexcept {
  has_room_.store(counts_.bytes_held <= kMaxPendingBytes && pending_.size() <= kMaxPendingCalls,
                  std::memory_order_relaxed);
}

}  // namespace shoal::client
