// The client of a worker in Python: waiting without the GIL, and what only Python can do about calls.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/mutex.h"
#include "base/units.h"
#include "bind/calls.h"
#include "bind/without_gil.h"
#include "client/client.h"
#include "shard/shard.h"

namespace shoal::bind {

using client::Client;
using client::Seconds;
using client::Waited;

// A thread that waits looks for signals so often: one that comes just before a sleep does not end it.
inline constexpr Seconds kSignalSeconds = 1.0;

// The client, and the Python functions of calls that are not settled.
class ClientBinding {
 public:
  ClientBinding(const std::string& module, std::uintptr_t context, const Identity& worker,
                const py::object& map, const client::Policy& policy, bool atomic_clocks, std::uint32_t clock,
                Seconds timeout, py::object report, std::string curve_server, std::string curve_public,
                std::string curve_secret, int heartbeat_ms, int silent_ms, int handshake_ms,
                Seconds signal_seconds)
      : report_(std::move(report)),
        signal_seconds_(signal_seconds),
        client_(std::make_unique<Client>(Zmq::of(module), reinterpret_cast<void*>(context),
                                         identity_of(worker), slot_map_of(map), policy, atomic_clocks,
                                         client::ClientOptions{.timeout = timeout,
                                                               .clock = clock,
                                                               .curve_server = std::move(curve_server),
                                                               .curve_public = std::move(curve_public),
                                                               .curve_secret = std::move(curve_secret),
                                                               .heartbeat_ms = heartbeat_ms,
                                                               .silent_ms = silent_ms,
                                                               .handshake_ms = handshake_ms})) {}
  ~ClientBinding() {
    if (!client_->is_of_this_process()) {
      static_cast<void>(client_.release());  // its lock may be held by a thread of the parent process
      return;
    }
    const WithoutGil nogil;
    client_.reset();
  }
  ClientBinding(const ClientBinding&) = delete;
  ClientBinding& operator=(const ClientBinding&) = delete;

  Client& client() const noexcept { return *client_; }

  void check_process() const {
    if (!client_->is_of_this_process()) {
      throw WrongProcessError(
          "this store was connected before a fork and belongs to the parent process: connect in the child, "
          "or start "
          "children with the 'spawn' method");
    }
  }

  void check() const {
    check_process();
    if (!client_->is_open()) {
      raise(make_error(Client::closed()));
    }
  }

  [[noreturn]] static void raise(const py::object& error) {
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    throw py::error_already_set();
  }

  // Waits without the GIL until `wait(time)` returns something else than that the time has come; false:
  // `until` came first.
  template <class Wait>
  bool run(const Wait& wait, Seconds until) const {
    for (;;) {
      Waited waited = Waited::kDone;
      {
        const WithoutGil nogil;
        waited = wait(std::min(until, Client::steady_now() + signal_seconds_));
      }
      if (waited == Waited::kDone || waited == Waited::kClosed) {
        return true;
      }
      if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
      }
      if (Client::steady_now() >= until) {
        return false;
      }
    }
  }

  // Does work on so many bytes with the lock of the client, which may be held by a thread that decodes or
  // encodes many rows: others may run Python meanwhile.
  template <class Work>
  static auto unlocked(std::uint64_t bytes, const Work& work) {
    constexpr std::uint64_t kMinUnlocked = 64 * KiB;
    if (bytes < kMinUnlocked) {
      return work();
    }
    const WithoutGil nogil;
    return work();
  }

  client::CallPtr submit(wire::Op op, std::uint32_t table, Described&& described, const py::object& after,
                         client::CallPtr follows, bool traced, std::uint64_t given_keys = 0) {
    prepare();
    std::uint64_t bytes = 0;
    if (const auto* const keyed = std::get_if<client::Keyed>(&described.operation)) {
      bytes = keyed->hashes.size_bytes() + keyed->values.size() + keyed->out.size();
    } else if (const auto* const of_slot = std::get_if<client::OfSlot>(&described.operation)) {
      bytes = of_slot->payload.count == 0 ? 0 : of_slot->payload.frames[0].bytes.size();
    }
    const std::vector<client::CallPtr> before = calls_of(after);
    client::Terms terms{.after = before,
                        .follows = std::move(follows),
                        .keep = keep(std::move(described.owners), std::move(described.memory)),
                        .given_keys = given_keys,
                        .is_traced = traced};
    return unlocked(bytes, [&] {
      return client_->submit(op, table, std::move(described.operation), std::move(terms), bytes);
    });
  }

  // Before calls are submitted: waits for room.
  void prepare() {
    check();
    release_kept();
    if (!client_->calls().has_room()) {
      run([this](Seconds until) { return client_->wait_for_room(until); }, client::kNever);
    }
  }

  client::CallPtr tick(bool traced) {
    check();
    release_kept();
    const WithoutGil nogil;
    return client_->tick(traced);
  }

  // Of an argument of Python.
  static std::optional<Seconds> timeout_of(const py::object& given) {
    if (given.is_none()) {
      return std::nullopt;
    }
    const double timeout = PyBool_Check(given.ptr()) ? -1.0 : PyFloat_AsDouble(given.ptr());
    const bool is_number = PyErr_Occurred() == nullptr && !PyBool_Check(given.ptr()) && !std::isnan(timeout);
    PyErr_Clear();
    SHOAL_CHECK(is_number, "timeout must be a number of seconds, got " + py::repr(given).cast<std::string>());
    return timeout;
  }

  void wait(const client::CallPtr& call, const std::optional<Seconds>& timeout) {
    if (!call->is_done()) {
      check_process();  // a client that was closed has settled it
      const Seconds until = timeout.has_value() ? Client::steady_now() + *timeout : client::kNever;
      if (!run([&](Seconds time) { return client_->wait(*call, time); }, until)) {
        raise(make_error({client::ErrorKind::kDeadlineExceeded,
                          "the " + call->name() + " is not done after " + seconds(*timeout) +
                              " s; it continues: wait again, or longer"}));
      }
    }
    tell();
  }

  void drain(const py::object& given_timeout) {
    const std::optional<Seconds> timeout = timeout_of(given_timeout);
    check();
    const std::uint64_t last = client_->calls().last_pending();
    const Seconds until = timeout.has_value() ? Client::steady_now() + *timeout : client::kNever;
    if (last != 0 && !run([&](Seconds time) { return client_->wait_for_all(last, time); }, until)) {
      raise(make_error({client::ErrorKind::kDeadlineExceeded,
                        std::to_string(client_->calls().count_pending(last)) + " calls are not done after " +
                            seconds(*timeout) + " s; they continue"}));
    }
    tell();
  }

  // Calls a function in the background thread when a call is settled, or here and now if it is already.
  void when_done(const client::CallPtr& call, const py::object& function) {
    if (call->is_done()) {
      function();
      return;
    }
    check_process();
    callbacks_[call.get()].push_back(function);
    if (!client_->notice(call)) {
      run_callbacks(*call);
    }
  }

  void run_callbacks(const client::Call& call) {
    const auto found = callbacks_.find(&call);
    if (found == callbacks_.end()) {
      return;
    }
    const std::vector<py::object> functions = std::move(found->second);
    callbacks_.erase(found);
    for (const py::object& function : functions) {
      function();
    }
  }

  void run_noticed() {
    for (const client::CallPtr& call : client_->calls().take_noticed()) {
      run_callbacks(*call);
    }
    tell();
  }

  // Has traces and failures taken, if there are any.
  void tell() const {
    if (!client_->is_of_this_process()) {
      return;  // its lock may have been held at the fork
    }
    release_kept();
    if (client_->calls().has_reports() && !report_.is_none()) {
      report_();
    }
  }

 private:
  static std::string seconds(Seconds timeout) { return py::str("{:g}").format(timeout).cast<std::string>(); }

  const py::object report_;
  const Seconds signal_seconds_;
  std::unique_ptr<Client> client_;
  std::unordered_map<const client::Call*, std::vector<py::object>> callbacks_;  // with the GIL
};

using BindingPtr = std::shared_ptr<ClientBinding>;

// The rows of a pull that are copied to every key as given, once it is settled.
struct Expansion {
  py::object batch;
  py::object rows;
  py::object pool;
  std::span<const float> unique;
  std::shared_ptr<const void> owner;  // of `unique`
  std::size_t dim = 0;
  struct Once {
    Mutex mutex;
    std::atomic<bool> is_done{false};
  };
  std::unique_ptr<Once> once = std::make_unique<Once>();
};

// A call of a client: the request behind a Future.
struct ClientCall {
  BindingPtr client;
  CallHandle handle{};
  std::optional<Expansion> expansion{};
};

}  // namespace shoal::bind
