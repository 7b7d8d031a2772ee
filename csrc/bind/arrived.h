// A message as it came from a socket, for Python to hold: its frames lie in libzmq's memory until it is let go.

#pragma once

#include "transport/multipart_message.h"

namespace shoal::bind {

struct Arrived {
  explicit Arrived(const Zmq& zmq) noexcept : parts(zmq) {}
  Parts parts;
};

}  // namespace shoal::bind
