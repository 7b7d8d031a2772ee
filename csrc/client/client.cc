// Leader and followers (Schmidt et al., 2000). There is one Dealer for each endpoint, and a lock. Whoever
// holds the lock may send and receive; a thread that submits a call sends it and returns. A thread that waits
// for a call is the *poller* if there is none: it receives what is there, sleeps on the files of the sockets
// without the lock, and wakes the next one when its own call is settled. The others sleep until their call is
// settled, or until they are to be the poller. So a lone call needs no second thread, and waiting costs no
// CPU.
//
//   submit  --lock----> Requests --outgoing--> Dealer             the calling thread
//   wait    --poller--> receive, on_time, send, sleep ..          until settled
//   work    --poller--> the same while no thread waits            a background thread of the owner
//
// The background thread is the poller when calls are pending and no thread has waited for kGrace seconds; a
// thread that waits then takes its place. So pushes that no thread waits for are acknowledged, and lost
// messages are sent again, also while all threads compute. It returns to its owner with what only the owner
// can do: run callbacks, ask for a map, log failures.

#include "client/client.h"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <ctime>
#include <utility>

#include "base/threads.h"
#include "client/connection.h"
#include "client/waiter.h"

namespace shoal::client {

namespace {

// Sleeps until a file is readable. True: a signal has ended it.
bool sleep(std::vector<pollfd>& files, Seconds until) noexcept {
  timespec left{};
  if (until < kNever) {
    constexpr Seconds kLongest = 1e6;
    const Seconds seconds = std::clamp(until - Client::steady_now(), 0.0, kLongest);
    left.tv_sec = static_cast<std::time_t>(seconds);
    left.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  }
  return ppoll(files.data(), files.size(), until < kNever ? &left : nullptr, nullptr) < 0 && errno == EINTR;
}

}  // namespace

Client::Client(const Zmq& zmq, void* context, const WorkerIdentity& worker, SlotMap map, const Policy& policy,
               bool atomic_clocks, ClientOptions options)
    : zmq_(zmq),
      context_(context),
      worker_(worker),
      options_(std::move(options)),
      stamp_(process_stamp()),
      requests_(worker, std::move(map), policy, atomic_clocks),
      received_(zmq_),
      clock_(options_.clock) {}

Client::~Client() {
  if (is_of_this_process()) {
    close();
    return;
  }
  for (std::unique_ptr<Connection>& connection : connections_) {
    static_cast<void>(connection.release());  // the sockets are the parent's
  }
}

bool Client::is_of_this_process() const noexcept { return stamp_ == process_stamp(); }

Failure Client::closed() { return {ErrorKind::kClosed, "this store was closed: connect again"}; }

Seconds Client::steady_now() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// --- calls -------------------------------------------------------------------------------------------------

CallPtr Client::submit(wire::Op op, std::uint32_t table, Operation what, Terms terms, std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  CallPtr call = start(op, table, std::move(what), std::move(terms), bytes);
  changed();
  return call;
}

CallPtr Client::start(wire::Op op, std::uint32_t table, Operation what, Terms terms, std::uint64_t bytes) {
  const Seconds now = steady_now();
  if (op == wire::Op::kPull) {
    calls_.count_keys(terms.given_keys, std::get<Keyed>(what).hashes.size());
  }
  CallPtr call =
      requests_.submit(op, table, clock(), now, now + options_.timeout, std::move(what), std::move(terms));
  if (op == wire::Op::kPush) {
    pushed_.insert(table);
  }
  return begun(std::move(call), bytes, now);
}

CallPtr Client::tick(bool is_traced) {
  const MutexLock lock(mutex_);
  for (const std::unique_ptr<CachedRows>& rows : caches_) {
    rows->end_clock();
  }
  const Seconds now = steady_now();
  CallPtr call =
      requests_.tick(clock(), {pushed_.begin(), pushed_.end()}, now, now + options_.timeout, is_traced);
  clock_.fetch_add(1, std::memory_order_relaxed);
  pushed_.clear();
  call = begun(std::move(call), 0, now);
  changed();
  // Other workers wait for this tick: it is sent now, not when somebody waits next.
  const Condition is_sent = [&] {
    mutex_.assert_held();
    return (poller_ != nullptr && poller_ != background_) || !requests_.waits_for_pushes(*call);
  };
  wait_until(is_sent, now + kTickSeconds);
  return call;
}

CallPtr Client::begun(CallPtr call, std::uint64_t bytes, Seconds now) {
  call->begun_at = now;
  calls_.begin(call, bytes);
  has_submitted_ = true;
  if (background_is_idle_) {
    wake_background();
  }
  return call;
}

// Sends what is due, and tells those whom it concerns.
void Client::changed() {
  send();
  if (poller_ != nullptr) {
    // What was to be received may have been noticed by sending: the poller sleeps on files that say nothing
    // of it.
    for (const std::unique_ptr<Connection>& connection : connections_) {
      receive(*connection, nullptr);
    }
    send();
    if (next_time() < poller_wakes_) {
      poller_->event.signal();
    }
  }
  account();
  tell_waiters();
}

// --- caches ------------------------------------------------------------------------------------------------

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

// --- settled calls -----------------------------------------------------------------------------------------

void Client::account() {
  while (requests_.has_settled()) {
    for (const CallPtr& call : requests_.take_settled()) {
      if (call->observer != nullptr) {
        call->observer->settled(call);  // first: it takes the trace of a call that others are made of
      }
      if (calls_.settle(call)) {
        wake_background();
      }
    }
    if (requests_.has_outgoing()) {
      send();  // what caches have submitted
    }
  }
}

// --- waiting -----------------------------------------------------------------------------------------------

Waited Client::wait(const Call& call, Seconds until) {
  const MutexLock lock(mutex_);
  return wait_until([&] { return call.is_done(); }, until);
}

Waited Client::wait_for_room(Seconds until) {
  const MutexLock lock(mutex_);
  return wait_until([this] { return calls_.has_room(); }, until);
}

Waited Client::wait_for_all(std::uint64_t serial, Seconds until) {
  const MutexLock lock(mutex_);
  return wait_until([&] { return calls_.are_settled(serial); }, until);
}

bool Client::notice(const CallPtr& call) {
  const MutexLock lock(mutex_);
  const bool is_pending = calls_.notice(call);
  if (is_pending) {
    wake_background();
  }
  return is_pending;
}

Waited Client::wait_until(const Condition& holds, Seconds until) {
  if (holds()) {
    return Waited::kDone;
  }
  std::unique_ptr<Waiter> waiter = take_waiter(&holds);
  const auto judge = [&] {
    return !is_open()                ? Waited::kClosed
           : waiter->was_interrupted ? Waited::kInterrupted
           : steady_now() >= until   ? Waited::kTimedOut
                                     : Waited::kDone;
  };
  Waited waited = Waited::kDone;
  while (!holds() && (waited = judge()) == Waited::kDone) {
    if (poller_ != nullptr && poller_ != background_) {
      waiters_.push_back(waiter.get());
      sleep_alone(*waiter, until);
      std::erase(waiters_, waiter.get());
      continue;
    }
    exchange(&holds);
    if (!holds()) {
      if (poller_ != nullptr) {
        poller_->event.signal();  // the background thread: this one takes its place
      }
      sleep_on_sockets(*waiter, std::min(until, next_time()));
    }
  }
  waited = holds() ? Waited::kDone : waited;
  waited_at_ = steady_now();
  waiter->holds = nullptr;
  idle_waiters_.push_back(std::move(waiter));
  tell_waiters();
  wake_next_poller();
  return waited;
}

// Sends and receives what there is, as long as it is not `enough`.
void Client::exchange(const Condition* enough) {
  send();
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    receive(*connections_[i], enough);
  }
  const Seconds now = steady_now();
  if (requests_.next_time() <= now) {
    requests_.on_time(now);
  }
  send();
  account();
  if (requests_.wants_map()) {
    wake_background();
  }
}

void Client::sleep_on_sockets(Waiter& waiter, Seconds until) {
  waiter.files.clear();
  waiter.files.push_back({waiter.event.file(), POLLIN, 0});
  bool is_ready = false;
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection->dealer != nullptr) {
      is_ready |= connection->is_ready || connection->is_monitor_ready;
      waiter.files.push_back({connection->dealer->file(), POLLIN, 0});
      waiter.files.push_back({connection->dealer->monitor_file(), POLLIN, 0});
    }
  }
  if (is_ready) {
    return;  // C6
  }
  const std::uint64_t version = connections_version_;
  poller_ = &waiter;
  poller_wakes_ = until;
  ++sleepers_;
  mutex_.unlock();
  const bool was_interrupted = sleep(waiter.files, until);
  mutex_.lock();
  --sleepers_;
  if (poller_ == &waiter) {
    poller_ = nullptr;
  }
  if (!is_open()) {
    slept_.notify_all();
  }
  waiter.was_interrupted |= was_interrupted;
  if (waiter.files[0].revents != 0) {
    waiter.event.drain();
  }
  std::size_t i = 1;
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (version != connections_version_) {
      connection->is_ready = connection->is_monitor_ready = true;
    } else if (connection->dealer != nullptr) {
      connection->is_ready |= waiter.files[i++].revents != 0;
      connection->is_monitor_ready |= waiter.files[i++].revents != 0;
    }
  }
}

void Client::sleep_alone(Waiter& waiter, Seconds until) {
  waiter.files.assign(1, {waiter.event.file(), POLLIN, 0});
  mutex_.unlock();
  const bool was_interrupted = sleep(waiter.files, until);
  mutex_.lock();
  waiter.was_interrupted |= was_interrupted;
  if (waiter.files[0].revents != 0) {
    waiter.event.drain();
  }
}

std::unique_ptr<Client::Waiter> Client::take_waiter(const Condition* holds) {
  std::unique_ptr<Waiter> waiter;
  if (idle_waiters_.empty()) {
    waiter = std::make_unique<Waiter>();
  } else {
    waiter = std::move(idle_waiters_.back());
    idle_waiters_.pop_back();
  }
  waiter->holds = holds;
  waiter->was_interrupted = false;
  return waiter;
}

// Has one of those who sleep alone become the poller.
void Client::wake_next_poller() {
  if (poller_ != nullptr && poller_ != background_) {
    return;
  }
  if (!waiters_.empty()) {
    waiters_.front()->event.signal();
  } else if (poller_ == nullptr && calls_.is_awaited()) {
    wake_background();
  }
}

void Client::tell_waiters() {
  for (const Waiter* const waiter : waiters_) {
    if ((*waiter->holds)()) {
      waiter->event.signal();
    }
  }
  if (poller_ != nullptr && poller_->holds != nullptr && (*poller_->holds)()) {
    poller_->event.signal();
  }
}

void Client::wake_background() const noexcept {
  if (background_ != nullptr) {
    background_->event.signal();
  }
}

// --- the background thread ---------------------------------------------------------------------------------

bool Client::has_work(Seconds now) const {
  return calls_.has_work(waited_at_ + kGrace <= now) || (requests_.wants_map() && map_at_ <= now);
}

bool Client::wait_for_work() {
  const MutexLock lock(mutex_);
  std::unique_ptr<Waiter> waiter = take_waiter(nullptr);
  background_ = waiter.get();
  for (;;) {
    const Seconds now = steady_now();
    if (!is_open() || has_work(now)) {
      break;
    }
    const bool is_due = calls_.is_awaited() || waited_at_ + kGrace <= now;
    if (calls_.has_pending() && poller_ == nullptr && is_due) {
      exchange();
      tell_waiters();
      if (!has_work(now) && calls_.has_pending() && poller_ == nullptr) {
        sleep_on_sockets(*waiter, requests_.wants_map() ? std::min(next_time(), map_at_) : next_time());
        exchange();
        tell_waiters();
      }
      continue;
    }
    // Looks again after a while if there are calls, or were; otherwise it is told of the next one.
    background_is_idle_ = !calls_.has_pending() && !has_submitted_;
    const Seconds until = background_is_idle_ ? kNever : now + kGrace;
    has_submitted_ = false;
    sleep_alone(*waiter, until);
    background_is_idle_ = false;
  }
  background_ = nullptr;
  idle_waiters_.push_back(std::move(waiter));
  return is_open();
}

bool Client::takes_map_request() {
  const MutexLock lock(mutex_);
  const Seconds now = steady_now();
  if (!requests_.wants_map() || map_at_ > now) {
    return false;
  }
  map_at_ = now + kGrace;
  return true;
}

// --- events ------------------------------------------------------------------------------------------------

void Client::set_map(SlotMap map) {
  const MutexLock lock(mutex_);
  if (is_open()) {
    requests_.set_map(std::move(map), steady_now());
    changed();
  }
}

void Client::lose(std::uint32_t server, const std::string& reason) {
  const MutexLock lock(mutex_);
  if (is_open()) {
    requests_.lose(server, reason, steady_now());
    changed();
  }
}

void Client::fail(Failure failure) {
  const MutexLock lock(mutex_);
  if (is_open()) {
    requests_.close(std::move(failure), steady_now());
    changed();
  }
}

void Client::leave() {
  const MutexLock lock(mutex_);
  requests_.leave(closed());
}

void Client::close() {
  const MutexLock lock(mutex_);
  if (!is_open()) {
    return;
  }
  requests_.close(closed(), steady_now());
  account();
  is_open_.store(false, std::memory_order_release);
  tell_waiters();
  if (poller_ != nullptr) {
    poller_->event.signal();
  }
  wake_background();
  while (sleepers_ != 0) {
    slept_.wait(mutex_);
  }
  connections_.clear();
}

// --- what is known -----------------------------------------------------------------------------------------

void Client::log_order(std::set<std::uint32_t> tables) {
  const MutexLock lock(mutex_);
  requests_.log_order(std::move(tables));
}

std::vector<Executed> Client::take_order() {
  const MutexLock lock(mutex_);
  return requests_.take_order();
}

bool Client::has_pushed() {
  const MutexLock lock(mutex_);
  return !pushed_.empty();
}

RequestCounts Client::request_counts() {
  const MutexLock lock(mutex_);
  return requests_.counts();
}

ClientCounts Client::counts() {
  const MutexLock lock(mutex_);
  return counts_;
}

std::vector<std::string> Client::connections() {
  const MutexLock lock(mutex_);
  std::vector<std::string> addresses;
  for (const std::unique_ptr<Connection>& connection : connections_) {
    addresses.push_back(connection->address);
  }
  return addresses;
}

}  // namespace shoal::client
