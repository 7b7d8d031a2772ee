// FastPool: threads in which a FastHandler answers requests that would hold up the I/O thread.
//
// Tasks are taken in order. The destructor waits for those in progress, and drops those that wait.
//
// Threads: any may add. A task must not throw.

#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"

namespace shoal {

class FastPool {
 public:
  using Task = std::function<void()>;

  explicit FastPool(std::size_t threads);
  ~FastPool();
  FastPool(const FastPool&) = delete;
  FastPool& operator=(const FastPool&) = delete;

  void add(Task task);

 private:
  void run();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  bool ended_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Thread>> threads_;  // last: they use the others
};

}  // namespace shoal
