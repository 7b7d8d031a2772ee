#include "base/threads.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/thread_team.h"

namespace shoal {

namespace {

std::atomic<std::size_t> stamp{1};

// Installed when the library is loaded, so that it cannot race with a fork.
[[maybe_unused]] const int installed = pthread_atfork(nullptr, nullptr, [] { stamp.fetch_add(1); });

// Signals a spin loop to the core, which gives more resources to the other hardware thread.
void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One call's parts, which threads take by number. It must outlive all threads that take them.
class Job {
 public:
  Job(std::size_t parts, const std::function<void(std::size_t)>& work) : work_(work), parts_(parts) {}

  void drain() noexcept {
    for (;;) {
      const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= parts_) {
        return;
      }
      try {
        work_(i);
      } catch (...) {  // carried to the caller: an exception must not leave a thread
        const MutexLock lock(mutex_);
        if (failure_ == nullptr) {
          failure_ = std::current_exception();
        }
      }
    }
  }

  // Called by the caller when all parts have ended.
  void rethrow() {
    const MutexLock lock(mutex_);
    if (failure_ != nullptr) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  const std::function<void(std::size_t)>& work_;
  const std::size_t parts_;
  std::atomic<std::size_t> next_{0};
  Mutex mutex_;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
};

}  // namespace

std::size_t process_stamp() noexcept { return stamp.load(std::memory_order_relaxed); }

// The worker threads and the job that they share. They exist only in the process that started them: see
// `stamp_`.
class ThreadPool::Workers {
 public:
  Workers() : stamp_(process_stamp()) {}

  // If a thread cannot be started, the destructor ends the others.
  void start(std::size_t helpers) {
    threads_.reserve(helpers);
    for (std::size_t i = 0; i < helpers; ++i) {
      try {
        threads_.emplace_back([this] { serve(); });
      } catch (const std::system_error& error) {
        throw std::runtime_error(
            "thread " + std::to_string(i + 2) + " of " + std::to_string(helpers + 1) +
            " could not be started: " + error.what() +
            ". Use fewer threads, or raise the limits of threads (ulimit -u) and of memory");
      }
    }
  }

  ~Workers() {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) {
      thread.join();
    }
  }

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  bool alive() const noexcept { return stamp_ == process_stamp(); }

  struct Turn {
    std::atomic_flag& taken;
    ~Turn() { taken.clear(std::memory_order_release); }
  };

  // False if another caller is using the workers: the caller then runs its parts alone.
  bool run(Job& job) {
    if (taken_.test_and_set(std::memory_order_acquire)) {
      return false;
    }
    const Turn turn{taken_};
    {
      const MutexLock lock(mutex_);
      job_ = &job;
      number_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.drain();
    spin([this] { return busy_.load(std::memory_order_acquire) == 0; });
    const MutexLock lock(mutex_);
    while (busy_.load(std::memory_order_relaxed) != 0) {
      done_.wait(mutex_);
    }
    job_ = nullptr;  // under the lock: a worker that wakes late finds no job
    return true;
  }

 private:
  void serve() {
    std::uint64_t seen = 0;
    const MutexLock lock(mutex_);
    for (;;) {
      while (!stop_ && number_.load(std::memory_order_relaxed) == seen) {
        wake_.wait(mutex_);
      }
      if (stop_) {
        return;
      }
      seen = number_.load(std::memory_order_relaxed);
      if (job_ == nullptr) {
        continue;
      }
      Job& job = *job_;
      busy_.fetch_add(1, std::memory_order_relaxed);
      mutex_.unlock();
      job.drain();
      mutex_.lock();
      if (busy_.fetch_sub(1, std::memory_order_release) == 1) {
        done_.notify_one();
      }
      mutex_.unlock();
      spin([&] { return number_.load(std::memory_order_acquire) != seen; });
      mutex_.lock();
    }
  }

  // Spins briefly before sleeping: a batch is processed in several consecutive runs, and sleeping and waking
  // between two of them takes as long as thousands of keys.
  template <class Happened>
  static void spin(const Happened& happened) noexcept {
    for (const auto begin = Clock::now(); !happened() && Clock::now() - begin < kSpin;) {
      for (int i = 0; i < kPauses && !happened(); ++i) {
        pause();
      }
    }
  }

  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSpin{25};
  static constexpr int kPauses = 8;  // between two readings of the clock

  const std::size_t stamp_;
  std::atomic_flag
      taken_;  // by the caller whose parts are running; not a mutex, since those parts may call run() too
  Mutex mutex_;
  CondVar wake_;
  CondVar done_;
  Job* job_ GUARDED_BY(mutex_) = nullptr;
  std::atomic<std::uint64_t> number_{0};  // the number of jobs so far; written under the mutex, as busy_ is
  std::atomic<std::size_t> busy_{0};
  bool stop_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(std::size_t threads)
    : threads_(threads < 1 ? 1 : threads), workers_(threads_ > 1 ? std::make_unique<Workers>() : nullptr) {
  if (workers_ != nullptr) {
    workers_->start(threads_ - 1);
  }
}

ThreadPool::~ThreadPool() {
  if (workers_ != nullptr && !workers_->alive()) {
    // Threads do not survive a fork: joining them would wait for ever. Their handles are leaked.
    static_cast<void>(workers_.release());
  }
}

void ThreadPool::restart_after_fork() {
  if (workers_ != nullptr && !workers_->alive()) {
    auto own = std::make_unique<Workers>();
    own->start(threads_ - 1);
    static_cast<void>(workers_.release());
    workers_ = std::move(own);
  }
}

void ThreadPool::run_parts(std::size_t parts, const std::function<void(std::size_t)>& work) {
  if (parts == 1) {
    return work(0);
  }
  Job job(parts, work);
  const auto member = [](void* data) { static_cast<Job*>(data)->drain(); };
  const bool shared =
      parts != 0 && workers_ != nullptr &&
      (run_on_thread_team(threads_, member, &job) || (workers_->alive() && workers_->run(job)));
  if (!shared) {
    job.drain();
  }
  job.rethrow();
}

struct Thread::Running {
  std::size_t stamp;
  std::thread thread;
};

Thread::Thread(std::function<void()> body) {
  // A new thread inherits the signal mask of the thread that creates it.
  sigset_t signals;
  sigset_t before;
  sigfillset(&signals);
  pthread_sigmask(SIG_SETMASK, &signals, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  };
  const Restore restore{before};
  // Last: a thread that runs while something here fails could be neither joined nor dropped.
  running_ = std::make_unique<Running>();
  running_->stamp = process_stamp();
  running_->thread = std::thread(std::move(body));
}

Thread::~Thread() {
  join();
  if (!is_of_this_process()) {
    static_cast<void>(running_.release());  // as in ~ThreadPool: the handle is leaked
  }
}

bool Thread::is_of_this_process() const noexcept { return running_->stamp == process_stamp(); }

void Thread::join() noexcept {
  if (is_of_this_process() && running_->thread.joinable()) {
    running_->thread.join();
  }
}

}  // namespace shoal
