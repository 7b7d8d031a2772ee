// OutgoingMessage: the frames of one message that is sent over a ZeroMQ socket.
//
// Everything that may fail for lack of memory comes first, when frames are added: libzmq has to be given all
// frames of a message of which it has accepted one. A frame is copied, or libzmq refers to its memory until
// it is sent.
//
// Threads: one, that of the socket. The memory of a frame is released by any thread.

#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "transport/buffer_pool.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class OutgoingMessage {
 public:
  static constexpr std::size_t kMaxFrames = 1 + wire::kMaxFrames;  // a header and the payload

  explicit OutgoingMessage(const Zmq& zmq) noexcept : zmq_(zmq) {}
  ~OutgoingMessage();
  OutgoingMessage(const OutgoingMessage&) = delete;
  OutgoingMessage& operator=(const OutgoingMessage&) = delete;

  // Add a frame: a copy of bytes, bytes of an owner, or a buffer. False: there is no memory.
  bool copy(wire::Frame bytes) noexcept;
  bool share(wire::Frame bytes, const std::shared_ptr<const void>& owner) noexcept;
  bool move(PooledBuffer& buffer) noexcept;

  std::size_t bytes() const noexcept { return bytes_; }  // of all frames

  // Without waiting; `peer` is its name, for a ROUTER socket. False: the socket has not accepted the message,
  // and nothing of it was sent, unless the context ends.
  bool send(void* socket, wire::Frame peer = {}) noexcept;

 private:
  zmq::Message& next() noexcept { return messages_.at(count_); }
  bool added(std::size_t bytes) noexcept;

  const Zmq& zmq_;
  std::array<zmq::Message, kMaxFrames> messages_;
  std::size_t count_ = 0;
  std::size_t sent_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace shoal
