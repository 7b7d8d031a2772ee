#include "base/mutex.h"

#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

namespace shoal::mutex_test {
using namespace std::chrono_literals;

namespace {

int count_with_threads() {
  Mutex mutex;
  int count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        const MutexLock lock(mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return count;
}

}  // namespace

TEST(threads_that_hold_a_mutex_exclude_each_other) { CHECK_EQ(count_with_threads(), 4000); }

TEST(a_mutex_that_is_held_cannot_be_locked_at_once) {
  Mutex mutex;
  CHECK(mutex.try_lock());
  std::thread([&] { CHECK(!mutex.try_lock()); }).join();
  {
    const MutexLock lock(mutex, std::adopt_lock);
  }
  CHECK(mutex.try_lock());
  mutex.unlock();
}

TEST(a_thread_that_waits_for_a_condition_releases_the_mutex) {
  Mutex mutex;
  CondVar changed;
  bool is_set = false;
  std::thread setter([&] {
    const MutexLock lock(mutex);
    is_set = true;
    changed.notify_one();
  });
  {
    const MutexLock lock(mutex);
    while (!is_set) {
      changed.wait(mutex);
    }
    const auto end = std::chrono::steady_clock::now() + 5ms;
    changed.wait_until(mutex, end);
    std::thread([&] { CHECK(!mutex.try_lock()); }).join();
  }
  setter.join();
  CHECK(mutex.try_lock());
  mutex.unlock();
}

}  // namespace shoal::mutex_test
