// Mutexes whose use clang checks: `make thread-safety` fails where a member is used without its mutex.
//
//   GUARDED_BY(mutex)   of a member: used by threads that hold the mutex
//   REQUIRES(mutex)     of a function: its callers hold the mutex
//
//   Mutex        std::mutex, and the same code
//   TimedMutex   a mutex for which a thread can wait until a deadline
//   MutexLock    holds either of them until the end of its scope
//   CondVar      std::condition_variable of a Mutex; waits in a loop, so that its condition is checked
//
// The check leaves out constructors and destructors, and locks chosen at run time, which are a
// std::unique_lock or a std::shared_lock. A lambda is checked as a function of its own: it begins with
// assert_held() of what its caller holds.
//
// Threads: any. g++ compiles the annotations to nothing.

#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define SHOAL_ANNOTATION(x) __attribute__((x))
#else
#define SHOAL_ANNOTATION(x)
#endif
#define CAPABILITY(name) SHOAL_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY SHOAL_ANNOTATION(scoped_lockable)
#define GUARDED_BY(mutex) SHOAL_ANNOTATION(guarded_by(mutex))
#define REQUIRES(...) SHOAL_ANNOTATION(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) SHOAL_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) SHOAL_ANNOTATION(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(result) SHOAL_ANNOTATION(try_acquire_capability(result))
#define ASSERT_CAPABILITY(mutex) SHOAL_ANNOTATION(assert_capability(mutex))

namespace shoal {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  // For the check alone: states that the calling thread holds the mutex.
  void assert_held() const noexcept ASSERT_CAPABILITY(this) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Not a std::timed_mutex, whose calls the thread sanitizer of g++ 12 does not know. Costs two locks of a
// Mutex.
class CAPABILITY("mutex") TimedMutex {
 public:
  TimedMutex() = default;
  TimedMutex(const TimedMutex&) = delete;
  TimedMutex& operator=(const TimedMutex&) = delete;

  void lock() ACQUIRE() {
    std::unique_lock lock(mutex_);
    unlocked_.wait(lock, [this] { return !is_locked_; });
    is_locked_ = true;
  }
  void unlock() RELEASE() {
    const std::lock_guard lock(mutex_);
    is_locked_ = false;
    unlocked_.notify_one();  // with mutex_ held: the next owner may destroy this
  }
  // Waits for the lock for at most that time. False: another thread still holds it.
  bool try_lock_for(std::chrono::milliseconds patience) TRY_ACQUIRE(true) {
    std::unique_lock lock(mutex_);
    if (!unlocked_.wait_for(lock, patience, [this] { return !is_locked_; })) {
      return false;
    }
    is_locked_ = true;
    return true;
  }
  void assert_held() const noexcept ASSERT_CAPABILITY(this) {}

 private:
  std::mutex mutex_;  // guards is_locked_, and is held for moments
  std::condition_variable unlocked_;
  bool is_locked_ = false;
};

template <class Locked>
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Locked& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Of a mutex that the calling thread has locked.
  MutexLock(Locked& mutex, std::adopt_lock_t /*locked*/) REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Locked& mutex_;
};

class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Both release the mutex while they wait, and may return early.
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    static_cast<void>(lock.release());
  }
  void wait_until(Mutex& mutex, std::chrono::steady_clock::time_point end) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    static_cast<void>(condition_.wait_until(lock, end));
    static_cast<void>(lock.release());
  }
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace shoal
