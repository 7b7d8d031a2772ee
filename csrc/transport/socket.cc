#include "transport/socket.h"

#include <algorithm>

namespace shoal {

Socket::Socket(const Zmq& zmq, void* context, int type, const std::string& what)
    : zmq_(zmq), socket_(zmq.socket(context, type)) {
  if (socket_ == nullptr) {
    fail(what);
  }
}

void Socket::fail(const std::string& what, const std::string& remedy) const {
  throw TransportError(what + ": " + zmq_.error_text(zmq_.error()) + remedy);
}

void Socket::set(int option, const void* value, std::size_t bytes) const {
  if (zmq_.set(socket_, option, value, bytes) != 0) {
    const auto names = zmq::names();
    const auto named =
        std::find_if(names.begin(), names.end(), [&](const auto& pair) { return pair.second == option; });
    fail("libzmq does not take the option " + std::string(named->first));
  }
}

void Socket::set_heartbeats(int interval_ms, int timeout_ms) const {
  if (interval_ms > 0) {
    set(zmq::kHeartbeatInterval, interval_ms);
    set(zmq::kHeartbeatTimeout, timeout_ms);
    set(zmq::kHeartbeatTtl, timeout_ms);
  }
}

}  // namespace shoal
