#include "transport/dealer.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

#include "transport/outgoing_message.h"

namespace shoal {

namespace {

constexpr int kReconnectMs = 20;  // between attempts of libzmq's, with back-off
constexpr int kMaxReconnectMs = 200;

std::atomic<std::uint64_t> monitors{0};  // for their names

}  // namespace

Dealer::Dealer(const Zmq& zmq, void* context, const std::string& address, const DealerOptions& options)
    : zmq_(zmq),
      dealer_(zmq, context, zmq::kDealer, "no socket for " + options.what + " at " + address),
      monitor_(zmq, context, zmq::kPair, "no socket for a monitor") {
  dealer_.set(zmq::kLinger, 0);
  dealer_.set(zmq::kSendHighWater, 0);
  // No limit: libzmq 4.3.5 aborts the process at the next heartbeat if a peer resets a connection whose
  // reading was suspended at the limit.
  dealer_.set(zmq::kReceiveHighWater, 0);
  dealer_.set(zmq::kMaxMessage, &options.max_reply_bytes, sizeof options.max_reply_bytes);
  dealer_.set(zmq::kReconnectInterval, kReconnectMs);
  dealer_.set(zmq::kMaxReconnectInterval, kMaxReconnectMs);
  dealer_.set(zmq::kHandshakeInterval, options.handshake_ms);
  dealer_.set_heartbeats(options.heartbeat_ms, options.silent_ms);
  if (address.find('[') != std::string::npos) {
    dealer_.set(zmq::kIpv6, 1);
  }
  if (!options.curve_server.empty()) {
    dealer_.set(zmq::kCurveServerKey, options.curve_server);
    dealer_.set(zmq::kCurvePublicKey, options.curve_public);
    dealer_.set(zmq::kCurveSecretKey, options.curve_secret);
  }
  monitor_.set(zmq::kLinger, 0);
  monitor_.set(zmq::kReceiveHighWater, 0);  // libzmq's thread would block while it is not read
  const std::string name =
      "inproc://shoal-dealer-" + std::to_string(getpid()) + "-" + std::to_string(monitors.fetch_add(1));
  // Events of failed handshakes are not requested: when libzmq 4.3.5 reports one, it overwrites the error
  // that it handles, treats the connection as full, and ends the process at its next heartbeat.
  if (zmq_.monitor(dealer_.get(), name.c_str(), zmq::kEventDisconnected | zmq::kEventGreeted) != 0 ||
      zmq_.connect(monitor_.get(), name.c_str()) != 0) {
    dealer_.fail("no monitor for " + options.what + " at " + address);
  }
  file_ = file_of(dealer_);
  monitor_file_ = file_of(monitor_);
  if (zmq_.connect(dealer_.get(), address.c_str()) != 0) {
    dealer_.fail("cannot connect to " + options.what + " at " + address);
  }
}

Dealer::~Dealer() {
  zmq_.monitor(dealer_.get(), nullptr, 0);  // first: an unread event would block libzmq's thread
}

int Dealer::file_of(const Socket& socket) const {
  int file = -1;
  std::size_t bytes = sizeof file;
  if (zmq_.get(socket.get(), zmq::kFile, &file, &bytes) != 0) {
    socket.fail("a socket has no file");
  }
  return file;
}

bool Dealer::has_ended() noexcept {
  bool ended = false;
  MultipartMessage event(zmq_);
  while (event.receive(monitor_.get()) == MultipartMessage::Result::kMessage) {
    std::uint16_t number = 0;
    if (event.frame(0).size() >= sizeof number) {
      std::memcpy(&number, event.frame(0).data(), sizeof number);
    }
    is_greeted_ |= number == zmq::kEventGreeted;
    ended |= number == zmq::kEventDisconnected;
  }
  return ended;
}

std::size_t Dealer::send(std::span<const std::byte> header, std::span<const SharedFrame> frames) noexcept {
  OutgoingMessage message(zmq_);
  bool is_complete = message.copy(header);
  for (std::size_t i = 0; i < frames.size() && is_complete; ++i) {
    const auto& [bytes, owner] = frames[i];
    const bool is_shared = owner != nullptr && bytes.size() >= kMinSharedBytes;
    is_complete = is_shared ? message.share(bytes, owner) : message.copy(bytes);
  }
  return is_complete && message.send(dealer_.get()) ? message.bytes() : 0;
}

}  // namespace shoal
