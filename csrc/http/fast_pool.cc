#include "http/fast_pool.h"

#include <utility>

namespace shoal {

FastPool::FastPool(std::size_t threads) {
  threads_.reserve(threads);
  for (std::size_t i = 0; i < threads; ++i) {
    threads_.push_back(std::make_unique<Thread>([this] { run(); }));
  }
}

FastPool::~FastPool() {
  std::deque<Task> dropped;  // after the lock
  {
    const MutexLock lock(mutex_);
    ended_ = true;
    dropped.swap(tasks_);
  }
  changed_.notify_all();
}

void FastPool::add(Task task) {
  {
    const MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void FastPool::run() {
  const MutexLock lock(mutex_);
  for (;;) {
    while (!ended_ && tasks_.empty()) {
      changed_.wait(mutex_);
    }
    if (ended_) {
      return;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    mutex_.unlock();
    task();
    task = nullptr;
    mutex_.lock();
  }
}

}  // namespace shoal
