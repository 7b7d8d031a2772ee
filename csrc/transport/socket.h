// Socket: a socket of libzmq that is closed at the end of its scope, with options that are checked.
//
// Threads: one, which makes, uses and closes it.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "transport/zmq.h"

namespace shoal {

class Socket {
 public:
  // Throws TransportError if there is none. `what`: of the error's text. `zmq` must outlive the socket.
  Socket(const Zmq& zmq, void* context, int type, const std::string& what);
  ~Socket() { zmq_.close(socket_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void* get() const noexcept { return socket_; }

  // Throw TransportError if libzmq does not accept the value.
  void set(int option, const void* value, std::size_t bytes) const;
  void set(int option, int value) const { set(option, &value, sizeof(value)); }
  void set(int option, std::string_view value) const { set(option, value.data(), value.size()); }
  // Heartbeats of the connections, each of which ends after so long without one; `interval_ms` 0: none.
  void set_heartbeats(int interval_ms, int timeout_ms) const;

  // Throws TransportError, with libzmq's last error between the texts.
  [[noreturn]] void fail(const std::string& what, const std::string& remedy = {}) const;

 private:
  const Zmq& zmq_;
  void* const socket_;
};

}  // namespace shoal
