#include "server/disposal.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

namespace shoal {

struct Disposal::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Shard>> shards;
  bool closed = false;

  void free_all() {
    std::unique_lock lock(mutex);
    while (!closed || !shards.empty()) {
      changed.wait(lock, [&] { return closed || !shards.empty(); });
      std::vector<std::shared_ptr<Shard>> mine;
      mine.swap(shards);
      lock.unlock();
      mine.clear();
      lock.lock();
    }
  }
};

Disposal::Disposal() noexcept = default;

Disposal::~Disposal() {
  if (thread_ == nullptr) {
    return;
  }
  if (!thread_->here()) {
    static_cast<void>(queue_.release());  // its lock may be held by a thread of the parent process
    return;
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->changed.notify_one();
  thread_->join();
}

void Disposal::add(std::shared_ptr<Shard> shard) noexcept {
  if (shard == nullptr) {
    return;
  }
  if (shard.use_count() == 1) {  // otherwise a save is still reading it
    shard->leave_budget();
  }
  try {
    if (thread_ == nullptr) {
      queue_ = std::make_unique<Queue>();
      thread_ = std::make_unique<Thread>([queue = queue_.get()] { queue->free_all(); });
    }
    const std::lock_guard lock(queue_->mutex);
    queue_->shards.push_back(std::move(shard));
    queue_->changed.notify_one();
  } catch (const std::exception&) {
    // It is freed at the end of this call.
  }
}

}  // namespace shoal
