// ZeroCopySender: sends a worker's messages through sockets that Python has created, without a Python object per frame.
//
// Algorithm. A small frame is copied. A large frame is sent from its owner's memory (zmq_msg_init_data); libzmq calls back
// when it no longer needs that memory, in a thread of its own in which no Python object may be touched. The callback pushes
// the buffer on a lock-free stack, and the sender's thread takes the owners from there.
//
//   send(frames) -> libzmq -> callback, in any thread -> next_released() -> the caller releases the owner
//
// Invariants
//   I1  An owner that was passed to send() is returned by next_released() once, and not before libzmq is done with its
//       memory. If send() throws, the owner stays with the caller.
//   I2  What libzmq releases after ~ZeroCopySender is not returned: its owner keeps its memory.
//
// Threads: one at a time, that of the sockets; libzmq's threads call back at any time.

#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "transport/multipart_message.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class ZeroCopySender {
 public:
  // Smaller frames are cheaper to copy.
  static constexpr std::size_t kMinBorrowedBytes = std::size_t{16} << 10U;

  struct Frame {
    wire::Frame bytes;
    void* owner = nullptr;  // of bytes that are sent in place; null: they are copied
  };

  explicit ZeroCopySender(const Zmq& zmq);
  ~ZeroCopySender();
  ZeroCopySender(const ZeroCopySender&) = delete;
  ZeroCopySender& operator=(const ZeroCopySender&) = delete;

  const Zmq& zmq() const noexcept { return zmq_; }

  // Sends one message of 1 to 1 + wire::kMaxFrames frames. False if the socket does not accept it or there is no memory: then
  // next_released() returns all its owners.
  bool send(void* socket, std::span<const Frame> frames);

  // The next owner whose memory is no longer in use; null: none at present.
  void* next_released() noexcept;
  // The number of frames that libzmq still uses.
  std::size_t borrowed() const noexcept;

 private:
  struct Shared;
  struct BorrowedBuffer;
  static void release(void* data, void* buffer) noexcept;
  static void drop(BorrowedBuffer* first) noexcept;
  bool fill(zmq::Message& message, const Frame& frame, std::unique_ptr<BorrowedBuffer>& buffer) noexcept;

  const Zmq zmq_;
  Shared* shared_;
  BorrowedBuffer* released_ = nullptr;  // taken from the shared stack, not yet returned
};

}  // namespace shoal
