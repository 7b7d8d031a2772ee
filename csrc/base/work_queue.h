// WorkQueue: items that a thread of its own processes, one after the other.
//
//   work(item)   while the item is in the queue, where find() sees it
//   done(item)   after that
//
// Threads: any; add() by one at a time. The first add() starts the thread. Neither function may throw. The
// destructor waits for the item in progress, and for the others if the queue drains. Fork: a child's copy
// processes nothing and waits for no thread.

#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "base/threads.h"

namespace shoal {

template <class Item>
class WorkQueue {
 public:
  enum class AtEnd : bool { kDrops, kDrains };
  using Function = std::function<void(Item&)>;

  WorkQueue(AtEnd at_end, Function work, Function done = {})
      : drains_(at_end == AtEnd::kDrains), work_(std::move(work)), done_(std::move(done)) {}

  ~WorkQueue() {
    if (thread_ == nullptr) {
      return;
    }
    if (!thread_->is_of_this_process()) {
      static_cast<void>(state_.release());  // its lock may be held by a thread of the parent process
      return;
    }
    {
      const MutexLock lock(state_->mutex);
      state_->closed = true;
    }
    state_->changed.notify_one();
    thread_->join();
  }

  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // False if as many as `most` are waiting or in progress. Throws if there is no memory or thread; then the
  // item is where it was.
  bool add(Item&& item, std::size_t most = std::numeric_limits<std::size_t>::max()) {
    if (thread_ == nullptr) {
      state_ = std::make_unique<State>();
      thread_ = std::make_unique<Thread>([this] { run(); });
    }
    std::list<Item> added;
    added.emplace_back();
    const MutexLock lock(state_->mutex);
    if (state_->items.size() >= most) {
      return false;
    }
    added.front() = std::move(item);
    state_->items.splice(state_->items.end(), added);
    state_->changed.notify_one();
    return true;
  }

  // Calls use(item) for the first item that is waiting or in progress for which is_wanted(item); false if
  // there is none.
  template <class Wanted, class Use>
  bool find(const Wanted& is_wanted, const Use& use) {
    if (state_ == nullptr) {
      return false;
    }
    const MutexLock lock(state_->mutex);
    const auto found = std::ranges::find_if(state_->items, is_wanted);
    if (found != state_->items.end()) {
      use(*found);
    }
    return found != state_->items.end();
  }

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    std::list<Item> items GUARDED_BY(mutex);  // the first one is in progress
    bool closed GUARDED_BY(mutex) = false;
  };

  void run() {
    const MutexLock lock(state_->mutex);
    for (;;) {
      while (!state_->closed && state_->items.empty()) {
        state_->changed.wait(state_->mutex);
      }
      if (state_->items.empty() || (state_->closed && !drains_)) {
        return;
      }
      Item& item = state_->items.front();
      state_->mutex.unlock();
      work_(item);
      state_->mutex.lock();
      std::list<Item> ended;
      ended.splice(ended.begin(), state_->items, state_->items.begin());
      state_->mutex.unlock();
      if (done_) {
        done_(ended.front());
      }
      ended.clear();
      state_->mutex.lock();
    }
  }

  const bool drains_;
  const Function work_;
  const Function done_;
  std::unique_ptr<State> state_;
  std::unique_ptr<Thread> thread_;  // last: it uses the others
};

}  // namespace shoal
