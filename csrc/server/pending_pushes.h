// PendingPushes: the pushes that wait for the end of their clock.
//
// Idea. Where all pushes of a clock become one step, each is copied and kept until everybody has ticked the clock. Then its
// step comes: table by table, all that was kept is merged in one order that does not depend on who was first.
//
//   step of clock 7   ticked 2 | tables {0, 3}           what the workers that ticked say they pushed to, anywhere
//                     kept   table 0: (rank 1, call 9) (rank 0, call 4) (rank 0, call 5)    as they came
//   pushes(0)          (rank 0, call 4) (rank 0, call 5) (rank 1, call 9)                    as they are merged
//
// Parts of one call that came in several messages hold different slots, so their order among themselves changes nothing.
//
// Invariants
//   I1  bytes() is the sum of the turns' bytes: what they keep, with kOverhead for each of them, each push
//       and each table named.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "policy/lifecycle.h"
#include "transport/buffer_pool.h"

namespace shoal {

class PendingPushes {
 public:
  static constexpr std::size_t kOverhead = 256;  // of a step; of one push, beside its numbers

  // One push: the hashes, then the gradients, then how often each row occurred, where not all did once, in one block.
  struct Push {
    std::uint32_t rank = 0;
    std::uint64_t sequence = 0;
    std::size_t count = 0;
    bool counted = false;
    PooledBuffer block;

    static std::size_t bytes(std::size_t count, std::size_t numbers, std::size_t counts) noexcept {
      return count * sizeof(std::uint64_t) + numbers * sizeof(float) + counts * sizeof(std::uint32_t);
    }
    std::span<const std::uint64_t> hashes() const noexcept { return block.as<std::uint64_t>().first(count); }
    std::span<const float> grads() const noexcept {
      const auto words = block.as<float>().subspan(2 * count);
      return words.first(words.size() - (counted ? count : 0));
    }
    std::span<const std::uint32_t> counts() const noexcept {
      return block.as<std::uint32_t>().last(counted ? count : 0);
    }
  };

  // Rows that go before the step.
  struct Sweep {
    std::uint32_t rank = 0;
    std::uint64_t sequence = 0;
    std::uint32_t table = 0;
    std::vector<Expiry> rules;
    bool done = false;
  };

  struct ClockStep {
    std::size_t ticked = 0;          // workers
    std::set<std::uint32_t> tables;  // those that get a step
    std::map<std::uint32_t, std::vector<Push>> kept;
    std::vector<Sweep> sweeps;  // in (rank, sequence) order
    std::size_t bytes = kOverhead;
    // Of the table that comes first, where memory ran out halfway: its rows that are stepped.
    std::size_t stepped = 0;
  };

  void add(std::uint32_t clock, std::uint32_t table, Push&& push);
  void sweep(std::uint32_t clock, Sweep&& sweep);
  void tick(std::uint32_t clock, std::span<const std::uint32_t> tables);
  // Forgets what a worker pushed, and asked to be swept, in clocks that it has not ticked, from `clock` on: how many pushes.
  std::size_t drop(std::uint32_t rank, std::uint32_t clock);
  void drop_table(std::uint32_t table);
  void clear();

  bool empty() const noexcept { return steps_.empty(); }
  std::uint32_t next() const noexcept {
    return steps_.begin()->first;
  }  // the least clock; not of an empty one
  ClockStep& first() noexcept { return steps_.begin()->second; }
  // The least table that the first step has something for.
  std::optional<std::uint32_t> next_table() const noexcept;
  // What the first step has for a table, in (rank, sequence) order.
  std::span<const Push> pushes(std::uint32_t table);
  // The table has its step.
  void finish_table(std::uint32_t table) noexcept;
  void pop() noexcept;

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t bytes(std::uint32_t clock) const noexcept {
    const auto step = steps_.find(clock);
    return step == steps_.end() ? 0 : step->second.bytes;
  }

 private:
  ClockStep& step(std::uint32_t clock);
  void add(ClockStep& step, std::size_t bytes) noexcept {
    step.bytes += bytes;
    bytes_ += bytes;
  }
  void take(ClockStep& step, std::size_t bytes) noexcept {
    step.bytes -= bytes;
    bytes_ -= bytes;
  }

  std::map<std::uint32_t, ClockStep> steps_;  // by clock
  std::size_t bytes_ = 0;
};

}  // namespace shoal
