// Dealer: a DEALER socket that is connected to one address, and observes the end of its connection.
//
// libzmq reconnects by itself after a connection was cut, but not after it has refused received data: its
// session then ends permanently, and a socket without a session accepts no messages. In neither case does it
// report that answers may be lost. So a socket monitor observes every end, and the owner replaces the Dealer
// and sends all unanswered messages again. What waited in the old socket is dropped, so nothing is sent twice
// over one connection.
//
// A frame of at least kMinSharedBytes is sent from the memory of its owner, which libzmq shares; a smaller
// one is copied.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/units.h"
#include "transport/multipart_message.h"
#include "transport/shared_frame.h"
#include "transport/socket.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

struct DealerOptions {
  std::string what{};  // the peer, in errors
  std::int64_t max_reply_bytes = 0;
  int heartbeat_ms = 0;
  int silent_ms = 0;           // without a heartbeat, after which the connection has ended
  int handshake_ms = 5000;     // for its handshake
  std::string curve_server{};  // public key of the peer; empty: no encryption
  std::string curve_public{};  // of this process
  std::string curve_secret{};
};

class Dealer {
 public:
  static constexpr std::size_t kMinSharedBytes = 16 * KiB;

  // Connects, without waiting. Throws TransportError if there is no socket, or the address is none.
  Dealer(const Zmq& zmq, void* context, const std::string& address, const DealerOptions& options);
  ~Dealer();
  Dealer(const Dealer&) = delete;
  Dealer& operator=(const Dealer&) = delete;

  // Whether the connection has ended since it was opened. Messages from before the end can still be received.
  bool has_ended() noexcept;
  // The handshake is done, as far as has_ended() has seen.
  bool is_greeted() const noexcept { return is_greeted_; }

  // Bytes sent; 0: the message was not sent at all.
  std::size_t send(std::span<const std::byte> header, std::span<const SharedFrame> frames) noexcept;
  MultipartMessage::Result receive(MultipartMessage& message) noexcept {
    return message.receive(dealer_.get());
  }

  // Files that become readable when there may be something to receive, or the connection has ended. Before a
  // sleep on them, receive() must have returned kNone, and has_ended() false.
  int file() const noexcept { return file_; }
  int monitor_file() const noexcept { return monitor_file_; }
  void* socket() const noexcept { return dealer_.get(); }
  void* monitor() const noexcept { return monitor_.get(); }

 private:
  int file_of(const Socket& socket) const;

  const Zmq& zmq_;
  const Socket dealer_;
  const Socket monitor_;
  int file_ = -1;
  int monitor_file_ = -1;
  bool is_greeted_ = false;
};

}  // namespace shoal
