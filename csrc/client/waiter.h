// Client::Waiter: a thread that waits, or the background thread.

#pragma once

#include <poll.h>

#include <vector>

#include "client/client.h"
#include "transport/event_fd.h"

namespace shoal::client {

struct Client::Waiter {
  EventFd event{"a thread that waits for servers"};
  const Condition* holds = nullptr;
  bool was_interrupted = false;
  std::vector<pollfd> files{};
};

}  // namespace shoal::client
