// SharedFrame: bytes that several messages refer to, and the owner of their memory.
//
// A frame that is sent to several peers, possibly more than once, is sent without a copy: libzmq holds a
// reference to the owner until it no longer needs the bytes.
//
// Threads: an owner may be released by any thread.

#pragma once

#include <memory>

#include "wire/wire.h"

namespace shoal {

struct SharedFrame {
  wire::Frame bytes{};
  std::shared_ptr<const void> owner{};
};

}  // namespace shoal
