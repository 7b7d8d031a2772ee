// SharedFrame: bytes that several messages refer to, and what keeps them.
//
// A frame that is sent to several peers, and perhaps again, is sent in place: libzmq holds a reference to its owner until it no longer
// needs the bytes.
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
