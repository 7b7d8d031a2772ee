// PendingPushes: under BSP, the pushes that wait for the end of their clock. All pushes of a clock become one
// step: table by table they are merged in the order of (rank, sequence), whatever the order of arrival.
//
//   step of clock 7   ticked 2 | tables {0, 3}, which the workers' ticks named
//                     table 0: (rank 1, call 9) (rank 0, call 4) (rank 0, call 5)   in order of arrival
//   pushes(0)         (rank 0, call 4) (rank 0, call 5) (rank 1, call 9)            in order of merging
//
// Invariants
//   I1  bytes() is the sum of the steps' bytes: the kept pushes, with kOverhead for each step, each push and
//       each named table.
//
// Threads: none of its own; one owner. Any thread may destroy it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "base/mix.h"
#include "policy/lifecycle.h"
#include "replica/slot_range.h"
#include "transport/buffer_pool.h"
#include "transport/multipart_message.h"

namespace shoal {

class PendingPushes {
 public:
  static constexpr std::size_t kOverhead = 256;  // of a step; of a push, in addition to its arrays

  // One push: the hashes, the gradients, and the rows' counts unless all are 1, in memory that `owner` keeps.
  // The slices of one message may share it.
  struct Push {
    std::uint32_t rank = 0;
    std::uint64_t sequence = 0;
    std::span<const std::uint64_t> hashes{};
    std::span<const float> grads{};
    std::span<const std::uint32_t> counts{};
    std::shared_ptr<const void> owner{};

    std::size_t bytes() const noexcept {
      return hashes.size_bytes() + grads.size_bytes() + counts.size_bytes();
    }
    // Makes it own its arrays: the hashes and gradients in frames that were taken from the received message,
    // where these are not empty, and the others in a copy.
    void keep(std::array<ReceivedFrame, 2>&& frames, BufferPool& buffers);
  };

  // A sweep that precedes the step.
  struct Sweep {
    std::uint32_t rank = 0;
    std::uint64_t sequence = 0;
    std::uint32_t table = 0;
    std::vector<Expiry> rules;
    bool done = false;
  };

  struct ClockStep {
    std::size_t ticked = 0;          // workers
    std::set<std::uint32_t> tables;  // that get a step
    std::map<std::uint32_t, std::vector<Push>> kept;
    std::vector<Sweep> sweeps;  // in (rank, sequence) order
    std::size_t bytes = kOverhead;
    // The number of stepped rows of the first table, if its step ran out of memory.
    std::size_t stepped = 0;
  };

  void add(std::uint32_t clock, std::uint32_t table, Push&& push);
  void sweep(std::uint32_t clock, Sweep&& sweep);
  void tick(std::uint32_t clock, std::span<const std::uint32_t> tables);
  // Drops a worker's pushes and sweeps of the clocks from `clock` on, which it has not ticked. Returns the
  // number of pushes.
  std::size_t drop(std::uint32_t rank, std::uint32_t clock);
  void drop_table(std::uint32_t table);
  void clear();

  bool empty() const noexcept { return steps_.empty(); }
  std::uint32_t next() const noexcept { return steps_.begin()->first; }  // the least clock; requires !empty()
  ClockStep& first() noexcept { return steps_.begin()->second; }
  // The first table, in order of numbers, that the first step still has to process.
  std::optional<std::uint32_t> next_table() const noexcept;
  // The pushes of the first step for a table, in (rank, sequence) order.
  std::span<const Push> pushes(std::uint32_t table);
  // Marks the table as processed.
  void finish_table(std::uint32_t table) noexcept;
  void pop() noexcept;

  // restore() checks that each push is of these slots and of a table of `dims` (by number), with rows of its
  // dim.
  void save(ByteWriter& out) const;
  static PendingPushes restore(ByteReader& in, Slots slots, const SlotRange& range,
                               const std::map<std::uint32_t, std::size_t>& dims);

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
