// Disposal: frees shards in a background thread.
//
// Returning the memory of a large table to the operating system takes seconds, and the data loop must answer
// requests meanwhile. A shard's share of the memory budget is released at once.
//
// Threads: add() by one at a time. The destructor waits until all is freed. Fork: as a WorkQueue.

#pragma once

#include <memory>

#include "base/work_queue.h"
#include "shard/shard.h"

namespace shoal {

class Disposal {
 public:
  // Frees the shard in this call if no memory or thread is available. Null is ignored.
  void add(std::shared_ptr<Shard> shard) noexcept;

 private:
  using Queue = WorkQueue<std::shared_ptr<Shard>>;

  Queue queue_{Queue::AtEnd::kDrains, [](std::shared_ptr<Shard>& shard) { shard.reset(); }};
};

}  // namespace shoal
