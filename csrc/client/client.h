// Client: the data plane of one worker: its Requests over ZeroMQ, used by any number of threads (client.cc).
//
// Invariants
//   C1  Sockets, requests and clock are used under the lock. A thread that sleeps uses files of sockets only.
//   C2  A call is settled by its deadline if a thread waits for it or the background thread lives: every
//       sleep ends at the next time at which something is due.
//   C3  The failure of a call that no thread waited for is returned once, by CallRegistry::take_unobserved().
//   C4  A connection that ends, or brings a damaged message, is replaced, and what its endpoint has not
//       answered is sent again over the new one.
//   C5  A push has the clock that the tick after it sends to the servers: both are read under the lock.
//   C6  A thread sleeps only on sockets that had nothing to receive after their files were last read.
//   C7  What caches hold back for as long as they may is sent with the tick: no push comes between.
//
// Threads: any number, but close() and the destructor by one at a time. Not in a child process.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/units.h"
#include "client/cached_rows.h"
#include "client/call_registry.h"
#include "client/requests.h"
#include "transport/multipart_message.h"
#include "transport/zmq.h"

namespace shoal::client {

struct ClientOptions {
  Seconds timeout = 60;        // in which every call is settled
  std::uint32_t clock = 0;     // at which the worker begins
  std::string curve_server{};  // public key of the servers; empty: no encryption
  std::string curve_public{};
  std::string curve_secret{};
  // After which a connection has ended: without a heartbeat, without a handshake.
  int heartbeat_ms = 2000;
  int silent_ms = 10000;
  int handshake_ms = 5000;
};

// Counts since the start.
struct ClientCounts {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
};

inline constexpr auto kClientStatistics = std::to_array<Statistic<ClientCounts>>({
    {"bytes_sent", number_of<&ClientCounts::bytes_sent>},
    {"bytes_received", number_of<&ClientCounts::bytes_received>},
});

enum class Waited : std::uint8_t { kDone, kTimedOut, kInterrupted, kClosed };

class Client final : private Submitter {
 public:
  static constexpr Seconds kGrace = 0.02;
  static constexpr Seconds kTickSeconds = 0.001;  // for the round trip of the pushes before a tick

  // `context`: a libzmq context, which outlives the client.
  Client(const Zmq& zmq, void* context, const WorkerIdentity& worker, SlotMap map, const Policy& policy,
         bool atomic_clocks, ClientOptions options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // --- calls: at the present clock, settled within the timeout ---

  // Starts a call and sends what may be sent. Failure::kClosed if the client was closed. Throws as
  // Requests::submit does. `bytes`: of its arrays.
  CallPtr submit(wire::Op op, std::uint32_t table, Operation what, Terms terms = {}, std::uint64_t bytes = 0);
  // Ends the clock, and sends it now: other workers wait for it. Returns after kTickSeconds at the latest.
  CallPtr tick(bool is_traced = false);

  // --- caches: their calls are those of the client ---

  // Keeps rows of a table until the client is destroyed.
  CachedRows& add_cache(std::unique_ptr<RowCache> cache, CachedRowsOptions options);
  // Has a cache do something, and sends what it submits.
  template <class Work>
  auto use(const Work& work) {
    const MutexLock lock(mutex_);
    const Finally finally{*this};
    return work();
  }
  // CachedRows::flush and forget of all.
  void flush_caches();
  void forget_rows();

  // --- waiting: until steady_now() reaches `until`; a signal ends it early ---

  Waited wait(const Call& call, Seconds until);
  // For room among the pending calls.
  Waited wait_for_room(Seconds until);
  // For the calls with a serial of at most this one.
  Waited wait_for_all(std::uint64_t serial, Seconds until);
  // CallRegistry::notice, and wakes the background thread.
  bool notice(const CallPtr& call);

  // --- for the background thread ---

  // Does the I/O that no thread does, until there is work for the owner; false: the client is closed.
  bool wait_for_work();
  // Whether a newer map is needed; the owner passes one in, and is not asked again for a while.
  bool takes_map_request();

  // --- events ---

  void set_map(SlotMap map);
  void lose(std::uint32_t server, const std::string& reason);
  void fail(Failure failure);
  // From now on calls that fail were closed: the servers refuse a process that leaves.
  void leave();
  // Closes the sockets; pending calls fail, and every later one.
  void close();

  // --- what is known ---

  // The pending and settled calls.
  CallRegistry& calls() noexcept { return calls_; }

  bool is_of_this_process() const noexcept;
  bool is_open() const noexcept { return is_open_.load(std::memory_order_acquire); }
  std::uint32_t clock() const noexcept override { return clock_.load(std::memory_order_relaxed); }
  Seconds timeout() const noexcept { return options_.timeout; }
  const WorkerIdentity& worker() const noexcept { return worker_; }
  bool has_pushed();
  // As Requests::log_order() and take_order().
  void log_order(std::set<std::uint32_t> tables);
  std::vector<Executed> take_order();
  RequestCounts request_counts();
  ClientCounts counts();
  // Addresses of the open connections.
  std::vector<std::string> connections();

  static Seconds steady_now() noexcept;
  // The failure of a client that was closed.
  static Failure closed();

 private:
  class Connection;
  struct Waiter;
  using Condition = std::function<bool()>;

  // Sends what is due at the end of a scope, also after an exception.
  struct Finally {
    Client& client;
    ~Finally() {
      client.mutex_.assert_held();
      client.changed();
    }
  };

  std::uint64_t repetitions() const noexcept override REQUIRES(mutex_) { return requests_.repetitions(); }
  CallPtr submit_rows(wire::Op op, std::uint32_t table, Keyed what, Terms terms) override REQUIRES(mutex_);
  CallPtr compose(wire::Op op, std::uint32_t table, bool is_traced) override REQUIRES(mutex_);
  void complete(const CallPtr& composed, std::optional<Failure> failure) override REQUIRES(mutex_);
  CallPtr start(wire::Op op, std::uint32_t table, Operation what, Terms terms, std::uint64_t bytes)
      REQUIRES(mutex_);
  Waited wait_until(const Condition& holds, Seconds until) REQUIRES(mutex_);
  CallPtr begun(CallPtr call, std::uint64_t bytes, Seconds now) REQUIRES(mutex_);
  void exchange(const Condition* enough = nullptr) REQUIRES(mutex_);
  void send() REQUIRES(mutex_);
  void receive(Connection& connection, const Condition* enough) REQUIRES(mutex_);
  void sleep_on_sockets(Waiter& waiter, Seconds until) REQUIRES(mutex_);
  void sleep_alone(Waiter& waiter, Seconds until) REQUIRES(mutex_);
  void wake_next_poller() REQUIRES(mutex_);
  void account() REQUIRES(mutex_);
  void tell_waiters() REQUIRES(mutex_);
  void changed() REQUIRES(mutex_);
  void follow_map() REQUIRES(mutex_);
  Connection& connect(const std::string& address) REQUIRES(mutex_);
  void drop(Connection& connection, const std::string& reason) REQUIRES(mutex_);
  void reopen() REQUIRES(mutex_);
  Seconds next_time() const REQUIRES(mutex_);
  std::unique_ptr<Waiter> take_waiter(const Condition* holds) REQUIRES(mutex_);
  void wake_background() const noexcept REQUIRES(mutex_);
  bool has_work(Seconds now) const REQUIRES(mutex_);

  const Zmq zmq_;
  void* const context_;
  const WorkerIdentity worker_;
  const ClientOptions options_;
  const std::size_t stamp_;  // of the process
  CallRegistry calls_;
  Mutex mutex_;
  CondVar slept_;  // a thread has ended its sleep on the sockets
  Requests requests_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Connection>> connections_ GUARDED_BY(mutex_);
  std::uint64_t connections_version_ GUARDED_BY(mutex_) = 0;  // changes with any of their files
  std::uint32_t connected_epoch_ GUARDED_BY(mutex_) = 0;      // of the map that the connections follow
  MultipartMessage received_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<CachedRows>> caches_ GUARDED_BY(mutex_);
  std::set<std::uint32_t> pushed_ GUARDED_BY(mutex_);  // tables pushed to in this clock
  ClientCounts counts_ GUARDED_BY(mutex_);
  std::vector<Waiter*> waiters_ GUARDED_BY(mutex_);     // that sleep alone
  Waiter* poller_ GUARDED_BY(mutex_) = nullptr;         // that sleeps on the sockets
  Waiter* background_ GUARDED_BY(mutex_) = nullptr;     // while it is in wait_for_work()
  bool background_is_idle_ GUARDED_BY(mutex_) = false;  // it sleeps until it is told that there are calls
  bool has_submitted_ GUARDED_BY(mutex_) = false;       // since the background thread last looked
  std::size_t sleepers_ GUARDED_BY(mutex_) =
      0;  // on the sockets: the poller, and one whose place it has taken
  Seconds poller_wakes_ GUARDED_BY(mutex_) = 0;
  Seconds waited_at_ GUARDED_BY(mutex_) = 0;  // when a thread last waited
  std::vector<std::unique_ptr<Waiter>> idle_waiters_ GUARDED_BY(mutex_);
  Seconds map_at_ GUARDED_BY(mutex_) = 0;  // when a map may be asked for again
  std::atomic<std::uint32_t> clock_;
  std::atomic<bool> is_open_{true};
};

}  // namespace shoal::client
