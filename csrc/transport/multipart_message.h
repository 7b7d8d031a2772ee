// MultipartMessage: one message of a ZeroMQ socket, received frame by frame without a copy.
//
// At most kMaxFrames frames are kept. Of a longer message only the first frames and the last one are kept, so
// count() == kMaxFrames means "too many". clear() and the destructor close what is kept.
//
//   ReceivedFrame  one frame, taken by take(): its bytes stay where libzmq received them
//   SharedMessage  references to all frames, made by share(); only very small frames are copied
//
// A frame of more than 8 KiB has memory of its own; a smaller one is a part of a buffer of 8 KiB that it
// shares with others, so take() leaves out what is below kMinTakenBytes.
//
// Threads: one owner, the thread that uses the socket. A ReceivedFrame or a SharedMessage may be destroyed by
// any thread, also after its socket was closed and its context terminated.

#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <memory>

#include "base/units.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class ReceivedFrame {
 public:
  ReceivedFrame() = default;  // none: no bytes

  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return message_ != nullptr; }

 private:
  friend class MultipartMessage;
  struct Close {
    int (*close)(zmq::Message*);
    void operator()(zmq::Message* message) const noexcept {
      close(message);
      delete message;
    }
  };
  // Moves the contents of `message`, and leaves it empty.
  ReceivedFrame(const Zmq& zmq, zmq::Message& message) : bytes_(zmq.size(&message)) {
    auto moved = std::make_unique<zmq::Message>();
    zmq.init(moved.get());
    zmq.move_message(moved.get(), &message);
    message_ = {moved.release(), Close{zmq.close_message}};
  }

  std::unique_ptr<zmq::Message, Close> message_;
  std::size_t bytes_ = 0;
};

class SharedMessage;

class MultipartMessage {
 public:
  static constexpr std::size_t kMinTakenBytes = 16 * KiB;
  // The peer's identity, a header, the payload frames, and one more than a message may have.
  static constexpr std::size_t kMaxFrames = 1 + 1 + wire::kMaxFrames + 1;
  enum class Result { kMessage, kNone, kClosed };

  explicit MultipartMessage(const Zmq& zmq) noexcept : zmq_(zmq) {}
  ~MultipartMessage() { clear(); }
  MultipartMessage(const MultipartMessage&) = delete;
  MultipartMessage& operator=(const MultipartMessage&) = delete;

  // Replaces the contents by the next message. kNone: there is none yet. kClosed: none will come.
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
      // libzmq delivers whole messages: once the first frame has arrived, so have the others. A signal may
      // interrupt the call.
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

  // References to all frames, which stay here as well.
  std::shared_ptr<SharedMessage> share();

  // Takes the frame whose bytes these are; an empty one remains in its place. None if the bytes are not those
  // of one whole frame, or fewer than kMinTakenBytes.
  ReceivedFrame take(wire::Frame bytes) {
    for (std::size_t i = 0; i < count_ && bytes.size() >= kMinTakenBytes; ++i) {
      const wire::Frame held = frame(i);
      if (held.data() == bytes.data() && held.size() == bytes.size()) {
        return {zmq_, messages_.at(i)};
      }
    }
    return {};
  }

 private:
  const Zmq zmq_;
  std::array<zmq::Message, kMaxFrames> messages_{};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

class SharedMessage {
 public:
  explicit SharedMessage(const Zmq& zmq) noexcept : zmq_(zmq) {}
  ~SharedMessage() {
    while (count_ > 0) {
      zmq_.close_message(&messages_.at(--count_));
    }
  }
  SharedMessage(const SharedMessage&) = delete;
  SharedMessage& operator=(const SharedMessage&) = delete;

  wire::Frame frame(std::size_t i) noexcept {
    return {static_cast<const std::byte*>(zmq_.data(&messages_.at(i))), zmq_.size(&messages_.at(i))};
  }

 private:
  friend class MultipartMessage;
  const Zmq zmq_;
  std::array<zmq::Message, MultipartMessage::kMaxFrames> messages_{};
  std::size_t count_ = 0;
};

inline std::shared_ptr<SharedMessage> MultipartMessage::share() {
  auto shared = std::make_shared<SharedMessage>(zmq_);
  for (; shared->count_ < count_; ++shared->count_) {
    zmq::Message& copy = shared->messages_.at(shared->count_);
    zmq_.init(&copy);
    zmq_.copy_message(&copy, &messages_.at(shared->count_));
  }
  return shared;
}

}  // namespace shoal
