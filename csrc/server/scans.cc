#include "server/scans.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <tuple>
#include <utility>

namespace shoal {

namespace {

auto name_of(const wire::Header& header) noexcept {
  return std::tuple(header.worker, header.incarnation, header.sequence, header.epoch, header.op, header.table,
                    header.aux);
}

}  // namespace

struct Scans::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Scan>> scans;  // the first one is in progress
  bool closed = false;

  void run(const std::function<void(const Scan&)>& done) {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !scans.empty(); });
      if (closed) {
        return;
      }
      Scan& scan = *scans.front();
      lock.unlock();
      try {
        scan.work(scan);
      } catch (...) {  // carried to the reply: an exception must not leave a thread
        scan.failure = std::current_exception();
      }
      lock.lock();
      const auto ended = std::move(scans.front());
      scans.pop_front();
      lock.unlock();
      done(*ended);
      lock.lock();
    }
  }
};

Scans::Scans(std::function<void(const Scan&)> done) noexcept : done_(std::move(done)) {}

Scans::~Scans() {
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

bool Scans::has(const wire::Header& header, std::string_view peer) {
  if (queue_ == nullptr) {
    return false;
  }
  const std::lock_guard lock(queue_->mutex);
  const auto found = std::ranges::find_if(
      queue_->scans, [&](const auto& scan) { return name_of(scan->header) == name_of(header); });
  if (found == queue_->scans.end()) {
    return false;
  }
  (*found)->peer = peer;  // it may have reconnected
  return true;
}

bool Scans::add(Scan&& scan) {
  if (thread_ == nullptr) {
    queue_ = std::make_unique<Queue>();
    thread_ = std::make_unique<Thread>([this] { queue_->run(done_); });
  }
  auto waiting = std::make_unique<Scan>(std::move(scan));
  const std::lock_guard lock(queue_->mutex);
  if (queue_->scans.size() >= kMost) {
    return false;
  }
  queue_->scans.push_back(std::move(waiting));
  queue_->changed.notify_one();
  return true;
}

}  // namespace shoal
