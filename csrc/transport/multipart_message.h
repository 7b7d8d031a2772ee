// MultipartMessage: one message of a ZeroMQ socket, received frame by frame without a copy.
//
// At most kMaxFrames frames are kept. Of a longer message the frames in between are read and dropped, and the last one is
// kept, so that count() == kMaxFrames means "too many". clear() and the destructor close what is kept.
//
// Threads: none of its own; one owner, the thread that uses the socket.

#pragma once

#include <array>
#include <cerrno>
#include <cstddef>

#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class MultipartMessage {
 public:
  // The peer's identity, a header, the payload frames, and one more than a message may have.
  static constexpr std::size_t kMaxFrames = 1 + 1 + wire::kMaxFrames + 1;
  enum class Result { kMessage, kNone, kClosed };

  explicit MultipartMessage(const Zmq& zmq) noexcept : zmq_(zmq) {}
  ~MultipartMessage() { clear(); }
  MultipartMessage(const MultipartMessage&) = delete;
  MultipartMessage& operator=(const MultipartMessage&) = delete;

  // Replaces the contents by the next message. kNone: there is none yet. kClosed: the socket delivers no more.
  Result receive(void* socket) noexcept {
    clear();
    for (bool more = true; more;) {
      // Frames beyond the limit replace each other in the last element.
      if (count_ == messages_.size()) {
        zmq_.close_message(&messages_.back());
        --count_;
      }
      zmq::Message& message = messages_.at(count_);
      zmq_.init(&message);
      ++count_;
      // libzmq delivers whole messages: once the first frame has arrived, so have the others. A signal may interrupt the call.
      while (zmq_.receive_message(&message, socket, zmq::kDontWait) < 0) {
        if (zmq_.error() != EINTR) {
          return zmq_.error() == EAGAIN ? Result::kNone : Result::kClosed;
        }
      }
      bytes_ += zmq_.size(&message);
      more = zmq_.more(&message) != 0;
    }
    return Result::kMessage;
  }

  void clear() noexcept {
    while (count_ > 0) {
      zmq_.close_message(&messages_.at(--count_));
    }
    bytes_ = 0;
  }

  std::size_t count() const noexcept { return count_; }
  std::size_t bytes() const noexcept { return bytes_; }  // of all frames, including those that were dropped
  wire::Frame frame(std::size_t i) noexcept {
    return {static_cast<const std::byte*>(zmq_.data(&messages_.at(i))), zmq_.size(&messages_.at(i))};
  }

 private:
  const Zmq zmq_;
  std::array<zmq::Message, kMaxFrames> messages_{};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace shoal
