// Disposal: frees shards in a thread of its own.
//
// Idea. Giving the memory of a large table back to the system takes seconds. A data loop that has put another table in its
// place has requests to answer meanwhile. What the shard had of a budget is given back at once.
//
// Threads: add() by one at a time; the thread is started by the first. The end waits until all is freed. Fork: a child's
// copy frees nothing and waits for nobody.

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

  // Freed here if there is no memory, or no thread, to do it elsewhere. Null: nothing.
  void add(std::shared_ptr<Shard> shard) noexcept;

 private:
  struct Queue;

  std::unique_ptr<Queue> queue_;
  std::unique_ptr<Thread> thread_;  // last: it uses the queue
};

}  // namespace shoal
