// The only place where threads start: ThreadPool for parts of one piece of work, Thread for one that serves.
//
// ThreadPool. Idea. Work is cut into numbered parts whose results do not depend on who runs them; `run` hands the
// numbers out and returns when all are done. The caller works too, so a pool of one starts no thread.
//
// Invariants
//   I1  run(parts, work) calls work(i) exactly once for each i below parts, and returns after the last.
//   I2  the first exception thrown by work is rethrown by run, after the other parts have ended.
//
// Threads: any number of callers at once. A caller that finds the workers busy with another caller's parts does
// all of its own: it never waits for a stranger's work, so nested and concurrent calls cannot deadlock.
//
// Thread. One function on a thread of its own, which handles no signals: those are the main thread's business.
// join() returns when the function has; it must not throw.
//
// Fork: threads do not survive a fork. A child's copy of a pool runs everything on the calling thread, and its end
// waits for nobody, as does that of a Thread.

#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace shoal {

class ThreadPool {
 public:
  // `threads` counts the caller; at least 1.
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t threads() const noexcept { return threads_; }

  // Called once per batch, not per key, which is why std::function will do.
  void run(std::size_t parts, const std::function<void(std::size_t)>& work);

 private:
  class Workers;
  std::size_t threads_;
  std::unique_ptr<Workers> crew_;  // null where threads_ == 1
};

class Thread {
 public:
  explicit Thread(std::function<void()> body);
  ~Thread();
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  // False in a child of the process that started it: nothing runs here.
  bool here() const noexcept;
  // Any number of times, by one thread at a time.
  void join() noexcept;

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

// Cuts [0, n) into `parts` neighbouring pieces of nearly equal length; piece i is [begin(i), begin(i + 1)).
struct Partition {
  std::size_t n;
  std::size_t parts;
  std::size_t begin(std::size_t i) const noexcept { return n / parts * i + (n % parts) * i / parts; }
};

// How many parts are worth handing out: one per thread, but none smaller than `least` items.
inline std::size_t parts_for(std::size_t n, std::size_t least, std::size_t threads) noexcept {
  const std::size_t most = n / least;
  return most < 1 ? 1 : (most < threads ? most : threads);
}

// Which process this is: differs in a child after fork. Costs one load.
std::size_t process_stamp() noexcept;

}  // namespace shoal
