// Disposal: frees shards in a background thread.
//
// Returning the memory of a large table to the operating system takes seconds, and the data loop must answer requests
// meanwhile. A shard's share of the memory budget is released at once.
//
// Threads: add() by one at a time; the first call starts the thread. The destructor waits until all is freed. Fork: a child's
// copy frees nothing and waits for no thread.

#pragma once

#include <memory>

#include "base/threads.h"
#include "shard/shard.h"

namespace shoal {

class Disposal {
 public:
  Disposal() noexcept;
  ~Disposal();
  Disposal(const Disposal&) = delete;
  Disposal& operator=(const Disposal&) = delete;

  // Frees the shard in this call if no memory or thread is available. Null is ignored.
  void add(std::shared_ptr<Shard> shard) noexcept;

 private:
  struct Queue;

  std::unique_ptr<Queue> queue_;
  std::unique_ptr<Thread> thread_;  // last: it uses the queue
};

}  // namespace shoal
