// Parts: a message as libzmq hands it over, frame by frame.
//
// Frames beyond `kMost` are read and dropped but for the last, so that whoever looks at the others sees that there are too
// many. What is kept is closed by clear(), or at the end.
//
// Threads: none of its own; one owner, and its socket is his.

#pragma once

#include <array>
#include <cerrno>
#include <cstddef>

#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

class Parts {
 public:
  // A peer's name, a header, frames, and one more than a message may have.
  static constexpr std::size_t kMost = 1 + 1 + wire::kMaxFrames + 1;
  enum class Got { kMessage, kNothing, kEnd };

  explicit Parts(const Zmq& zmq) noexcept : zmq_(zmq) {}
  ~Parts() { clear(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  // The next message, if there is one; kEnd: the socket gives no more. Cleared before.
  Got receive(void* socket) noexcept {
    clear();
    for (bool more = true; more;) {
      // Frames that are not kept all go through the last place.
      if (count_ == messages_.size()) {
        zmq_.close_message(&messages_.back());
        --count_;
      }
      zmq::Message& message = messages_.at(count_);
      zmq_.init(&message);
      ++count_;
      // Once the first part is here, so are the others: libzmq hands over whole messages. A signal may come between.
      while (zmq_.receive_message(&message, socket, zmq::kDontWait) < 0) {
        if (zmq_.error() != EINTR) {
          return zmq_.error() == EAGAIN ? Got::kNothing : Got::kEnd;
        }
      }
      bytes_ += zmq_.size(&message);
      more = zmq_.more(&message) != 0;
    }
    return Got::kMessage;
  }

  void clear() noexcept {
    while (count_ > 0) {
      zmq_.close_message(&messages_.at(--count_));
    }
    bytes_ = 0;
  }

  std::size_t count() const noexcept { return count_; }
  std::size_t bytes() const noexcept { return bytes_; }  // of all frames, also of those that were not kept
  wire::Frame frame(std::size_t i) noexcept {
    return {static_cast<const std::byte*>(zmq_.data(&messages_.at(i))), zmq_.size(&messages_.at(i))};
  }

 private:
  const Zmq zmq_;
  std::array<zmq::Message, kMost> messages_{};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace shoal
