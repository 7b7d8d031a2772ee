// CallRegistry: the calls of a client that are pending, and those that are settled, for its owner to take.
//
// A pending call was begun and is not settled; its arrays take up room. A settled call may be in several
// lists, and is taken from each once: *noticed* (a function waits for its end), *traced*, *failed* (to be
// logged), and *unobserved* (failed, where the caller need not wait: a push, a tick, a function of a user
// that changes rows).
//
// Threads: any number. Its mutex is the innermost: no function of others is called with it held.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/mutex.h"
#include "base/statistic.h"
#include "base/units.h"
#include "client/call.h"

namespace shoal::client {

// How long calls of one op took until they were settled.
struct CallDurations {
  double seconds = 0;                      // in total
  std::array<std::uint64_t, 64> counts{};  // by powers of two of nanoseconds
};

// Counts since the start.
struct CallCounts {
  std::uint64_t under_way = 0;   // calls
  std::uint64_t bytes_held = 0;  // of their arrays
  std::uint64_t keys = 0;        // of pulls, as they were given
  std::uint64_t unique_keys = 0;
};

inline constexpr auto kCallStatistics = std::to_array<Statistic<CallCounts>>({
    {"under_way", number_of<&CallCounts::under_way>},
    {"bytes_held", number_of<&CallCounts::bytes_held>},
    {"keys", number_of<&CallCounts::keys>},
    {"unique_keys", number_of<&CallCounts::unique_keys>},
});

class CallRegistry {
 public:
  static constexpr std::uint64_t kMaxPendingBytes = 256 * MiB;  // of arrays; who submits more waits
  static constexpr std::size_t kMaxPendingCalls = 1024;

  // --- of the client ---

  // A call begins, with so many bytes of arrays, unless it is settled already.
  void begin(const CallPtr& call, std::uint64_t bytes);
  void count_keys(std::uint64_t given, std::uint64_t unique);
  // A call is settled. True: the owner has to know, since it has failed or is noticed.
  bool settle(const CallPtr& call);
  // Has take_noticed() return the call when it is settled. False: it is settled.
  bool notice(const CallPtr& call);
  // Whether such a call is pending.
  bool is_awaited() const;
  // Whether there are calls to be taken: noticed, failed, or traced.
  bool has_work(bool counts_traced) const;
  bool are_settled(std::uint64_t last) const;

  // --- of the owner ---

  bool has_room() const noexcept { return has_room_.load(std::memory_order_relaxed); }
  bool has_pending() const;
  // The serial of the last call that is pending; 0: none is.
  std::uint64_t last_pending() const;
  // Of the calls with a serial of at most `last`.
  std::size_t count_pending(std::uint64_t last) const;
  std::vector<CallPtr> take_noticed();
  std::vector<CallPtr> take_traced();
  std::vector<CallPtr> take_failed();
  // Whether there are traced or failed calls.
  bool has_reports() const noexcept { return has_reports_.load(std::memory_order_relaxed); }
  bool has_unobserved() const noexcept { return has_unobserved_.load(std::memory_order_relaxed); }
  std::vector<CallPtr> take_unobserved();
  // A thread has seen the failure of this call.
  void observed(const Call& call);
  CallCounts counts() const;
  std::map<wire::Op, CallDurations> durations() const;

 private:
  void note_reports() noexcept REQUIRES(mutex_);
  void note_room() noexcept REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<std::uint64_t, CallPtr> pending_ GUARDED_BY(mutex_);  // by serial
  CallCounts counts_ GUARDED_BY(mutex_);
  std::map<wire::Op, CallDurations> durations_ GUARDED_BY(mutex_);
  std::set<const Call*> awaited_ GUARDED_BY(mutex_);  // to be noticed
  std::vector<CallPtr> noticed_ GUARDED_BY(mutex_);
  std::vector<CallPtr> traced_ GUARDED_BY(mutex_);
  std::vector<CallPtr> failed_ GUARDED_BY(mutex_);
  std::vector<CallPtr> unobserved_ GUARDED_BY(mutex_);
  std::atomic<bool> has_room_{true};
  std::atomic<bool> has_reports_{false};
  std::atomic<bool> has_unobserved_{false};
};

}  // namespace shoal::client
