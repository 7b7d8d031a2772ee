// A received message as a Python object: its frames stay in libzmq's memory until the object is destroyed.

#pragma once

#include "transport/multipart_message.h"

namespace shoal::bind {

struct ReceivedMessage {
  explicit ReceivedMessage(const Zmq& zmq) noexcept : message(zmq) {}
  MultipartMessage message;
};

}  // namespace shoal::bind
