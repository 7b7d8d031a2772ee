// Courier: carries a worker's messages to and from sockets that Python has made, without an object of Python's for each
// frame.
//
// Idea. A small frame is copied. A large one is lent: libzmq sends from the owner's memory, and tells when it has no more
// use for it, in a thread of its own where nothing of Python may be touched. So what comes back is only put aside, and its
// owner is told at the next occasion.
//
//   send(frames) -> libzmq -> given back, in any thread -> returned() -> the owner lets go
//
// Invariants
//   I1  an owner given to send() is in returned() once, and not before libzmq is done with the memory; where send throws it
//       stays the caller's.
//   I2  what libzmq gives back after ~Courier is nobody's: its owner is never told, and keeps its memory.
//
// Threads: one at a time, that of the sockets; libzmq's threads give back at any time.

#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "transport/multipart_message.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class Courier {
 public:
  // From here on lending is cheaper than copying.
  static constexpr std::size_t kLent = std::size_t{16} << 10U;

  struct Frame {
    wire::Frame bytes;
    void* owner = nullptr;  // of bytes that may be lent; null: they are copied
  };

  explicit Courier(const Zmq& zmq);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  const Zmq& zmq() const noexcept { return zmq_; }

  // One message of 1 to 1 + kMaxFrames frames. Where the socket takes none, or there is no memory: false, and all owners are
  // in returned().
  bool send(void* socket, std::span<const Frame> frames);

  // The next owner whose memory is free again; null: no more so far.
  void* returned() noexcept;
  // Messages' frames that are lent and not back.
  std::size_t lent() const noexcept;

 private:
  struct Home;
  struct Loan;
  static void give_back(void* data, void* loan) noexcept;
  static void drop(Loan* first) noexcept;
  bool fill(zmq::Message& message, const Frame& frame, std::unique_ptr<Loan>& loan) noexcept;

  const Zmq zmq_;
  Home* home_;
  Loan* returned_ = nullptr;  // taken from home, not told yet
};

}  // namespace shoal
