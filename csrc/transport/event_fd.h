// EventFd: an eventfd, which makes a poll() of another thread return.
//
// Threads: any.

#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "transport/zmq.h"

namespace shoal {

class EventFd {
 public:
  // Throws TransportError if there is none. `owner`: in its text.
  explicit EventFd(const std::string& owner) : file_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (file_ < 0) {
      throw TransportError("no eventfd for " + owner + ": " + std::strerror(errno) +
                           "; raise the limit of open files (ulimit -n)");
    }
  }
  ~EventFd() { close(file_); }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int file() const noexcept { return file_; }
  void signal() const noexcept {
    const std::uint64_t increment = 1;
    // Fails only if the counter is full; then poll() returns anyway.
    static_cast<void>(!write(file_, &increment, sizeof increment));
  }
  void drain() const noexcept {
    std::uint64_t counter = 0;
    static_cast<void>(!read(file_, &counter, sizeof counter));
  }

 private:
  int file_;
};

}  // namespace shoal
