// Mutexes whose use clang checks: `make thread-safety` fails where a member is used without its mutex.
//
//   GUARDED_BY(mutex)   of a member: used by threads that hold the mutex
//   REQUIRES(mutex)     of a function: its callers hold the mutex
//
//   Mutex       std::mutex, and the same code
//   MutexLock   holds it until the end of its scope
//   CondVar     std::condition_variable of a Mutex; waits in a loop, so that its condition is checked
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

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Of a mutex that the calling thread has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t /*locked*/) REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
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
