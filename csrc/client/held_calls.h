// HeldCalls: calls that begin when others are done, for `after`.
//
//   hold(call, {a, b}) -> held --a and b have succeeded--> due: it begins, as if it were submitted then
//                              '--one of them has failed-> due: it fails too
//
// Invariants
//   H1  A call waits only for calls that were submitted before it: none waits for itself.
//   H2  Calls that wait for the same calls become due in the order in which they were submitted.
//   H3  holds_of() counts all that is held: the tick of a clock is not sent before its calls have begun or
//       failed.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "client/call.h"

namespace shoal::client {

class HeldCalls {
 public:
  std::size_t size() const noexcept { return held_.size(); }
  bool has(const Call& call) const noexcept { return call.is_held_; }
  // In the order in which they were submitted.
  std::vector<CallPtr> calls() const;
  // The first call that a held one waits for; null: it is due.
  const Call* blocker(const Call& call) const noexcept;
  std::size_t holds_of(std::uint32_t clock) const noexcept;

  // Holds a call until others, one or more that are not settled, have succeeded.
  void hold(const CallPtr& call, std::vector<Call*> after);
  // Holds a call no longer, since it begins or is settled.
  CallPtr release(Call& call);
  // Makes due what has waited for a call that is settled now.
  void settled(Call& call);
  // A held call that is to begin, or to fail because of the second one; nullopt: none is due.
  std::optional<std::pair<CallPtr, const Call*>> take_due();

 private:
  std::map<std::uint64_t, CallPtr> held_;          // by serial
  std::map<std::uint32_t, std::size_t> by_clock_;  // how many
  struct Due {
    std::uint64_t serial;
    CallPtr failed;
  };
  std::deque<Due> due_;
  CallPtr failed_;  // of the last one that was taken
};

}  // namespace shoal::client
