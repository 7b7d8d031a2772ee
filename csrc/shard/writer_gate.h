// WriterGate: which calls may change the rows of a shard (a readers-writer lock that does not starve its
// writers). Calls that change rows enter together; pushes with a UserRule, and whoever pauses the others,
// enter alone.
//
// Invariants
//   I1  Whoever waits to enter alone is next: later calls wait behind it.
//   I2  A user's code that runs inside may not enter: std::invalid_argument, because its caller may have
//       entered.
//
// Threads: any. pause() and resume() are called in pairs by one thread.

#pragma once

#include <mutex>
#include <shared_mutex>

#include "base/check.h"
#include "base/mutex.h"
#include "optim/user_rule.h"

namespace shoal {

class WriterGate {
 public:
  std::shared_lock<std::shared_mutex> enter() {
    check_not_stepping();
    {
      const MutexLock wait(next_);
    }
    return std::shared_lock(writers_);
  }
  std::unique_lock<std::shared_mutex> enter_alone() {
    check_not_stepping();
    const MutexLock hold(next_);
    return std::unique_lock(writers_);
  }
  void pause() { static_cast<void>(enter_alone().release()); }
  void resume() { writers_.unlock(); }

 private:
  static void check_not_stepping() {
    SHOAL_CHECK(!is_stepping(),
                "the step of an optimizer, or a function of rows, may not change, save or sweep a table");
  }

  Mutex next_;  // held by whoever waits to enter alone
  std::shared_mutex writers_;
};

}  // namespace shoal
