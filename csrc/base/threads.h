// The only place that starts threads: ThreadPool for the parts of one computation, Thread for background
// work.
//
// ThreadPool. Fork-join parallelism with dynamic scheduling. Work is cut into numbered parts whose results do
// not depend on the thread that runs them; the caller runs parts too, so a pool of one thread starts none.
//
// Invariants
//   I1  run(parts, work) calls work(i) exactly once for each i below parts, and returns after the last call.
//   I2  The first exception thrown by work is rethrown by run, after the other parts have ended.
//
// Threads: any number of callers. A caller that finds the workers in use runs all its parts itself, so nested
// and concurrent calls cannot deadlock. A Thread blocks signals, and its function must not throw.
//
// Fork: threads do not survive a fork. A child's copy of a pool runs everything in the calling thread;
// destroying it, or a child's copy of a Thread, waits for nothing.

#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace shoal {

class ThreadPool {
 public:
  // `threads` includes the caller; at least 1.
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t threads() const noexcept { return threads_; }

  // Starts threads of its own in a child process, where those of the parent do not exist.
  void restart_after_fork();

  // work(i) of a part i. Called once per batch, not per key, so the cost of a std::function does not matter; it
  // refers to the work, and so allocates nothing.
  template <class Work>
  void run(std::size_t parts, const Work& work) {
    run_parts(parts, std::cref(work));
  }

 private:
  void run_parts(std::size_t parts, const std::function<void(std::size_t)>& work);

  class Workers;
  std::size_t threads_;
  std::unique_ptr<Workers> workers_;  // null if threads_ == 1
};

class Thread {
 public:
  explicit Thread(std::function<void()> body);
  ~Thread();
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  // False in a child of the process that started it, where the thread does not exist.
  bool is_of_this_process() const noexcept;
  // May be called repeatedly, by one thread at a time.
  void join() noexcept;

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

// Cuts [0, n) into `parts` contiguous pieces of nearly equal length; piece i is [begin(i), begin(i + 1)).
struct Partition {
  std::size_t n;
  std::size_t parts;
  std::size_t begin(std::size_t i) const noexcept { return n / parts * i + (n % parts) * i / parts; }
};

// The number of parts to use: one per thread, but none smaller than `least` items.
inline std::size_t parts_for(std::size_t n, std::size_t least, std::size_t threads) noexcept {
  const std::size_t most = n / least;
  return most < 1 ? 1 : (most < threads ? most : threads);
}

// Identifies the process: differs in a child after fork. Costs one load.
std::size_t process_stamp() noexcept;

}  // namespace shoal
