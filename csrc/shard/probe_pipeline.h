// ProbePipeline: one thread's pass over its part of a batch, slot by slot, with several runs of rows in
// flight (software pipelining of the steps of table/probe.h), also where a run ends with its slot.
//
//   run n + 1   prepare: its slots are locked, its hashes' home lines computed
//   run n       probe: reads its lines, prefetched one step earlier, and prefetches those of the next run
//   run n - 1   resolve: finishes the remaining searches
//   run n - 1   its rows are used, while more lines of run n + 1 are prefetched; wide rows, which lie
//               elsewhere, one step later: while those of run n - 2 are used, those of run n - 1 are
//               prefetched one by one, because the processor keeps only about two dozen lines in flight
//
// Locks. A slot is locked when its first hash is loaded and released when the run with its last one has been
// used: a few adjacent slots at a time, in ascending order. If all slots share one lock, the caller holds it
// already and Lock is NoLock.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <type_traits>
#include <utility>

#include "base/prefetch.h"
#include "shard/row_locations.h"
#include "shard/slot_state.h"
#include "table/probe.h"
#include "table/slot_table.h"

namespace shoal {

// For slots that the caller has locked.
struct NoLock {
  NoLock() = default;
  explicit NoLock(std::shared_mutex& /*of_slot*/) noexcept {}
};

// Lock is std::shared_lock or std::unique_lock of a slot's mutex, or NoLock. A Worker is called in the order
// of the batch:
//   enter(slot, hashes)      the slot is locked and not yet probed; may insert
//   use(run, first, ahead)   the rows of a run that begins at `first`, null if absent; may insert. Prefetches
//                            lines of `ahead` now and then, and with wide rows one row of it per row used
//   touched                  number of bytes that it uses of each row, from the front
template <class Lock>
class ProbePipeline {
 public:
  // Slot s of `slots` has the hashes [offsets[s], offsets[s + 1]). A run has at most `max_rows` rows. Rows in
  // `known` are not searched; found rows are recorded in `noted`.
  ProbePipeline(std::span<const std::unique_ptr<SlotState>> slots, std::size_t first_slot,
                const Layout& layout, std::span<const std::uint64_t> hashes,
                std::span<const std::uint64_t> offsets, std::size_t max_rows,
                const RowLocations* known = nullptr, RowLocations* noted = nullptr)
      : slots_(slots),
        first_slot_(first_slot),
        layout_(layout),
        known_(known),
        noted_(noted),
        hashes_(hashes),
        offsets_(offsets),
        max_rows_(std::min(max_rows, Probe::kMax)),
        lag_(layout.narrow ? 1 : 2),
        runs_{Run(layout), Run(layout), Run(layout), Run(layout)} {}

  // Processes the slots [first, end).
  template <class Worker>
  void walk(std::size_t first, std::size_t end, Worker& worker) {
    slot_ = first;
    next_ = offsets_[first];
    end_ = offsets_[end];
    load(run(0), worker);
    run(0).probe.home_lines().drain();
    // The last runs are empty: they flush the pipeline.
    for (std::size_t n = 0; n < lag_ || run(n - lag_).probe.size() != 0; ++n) {
      load(run(n + 1), worker);
      PrefetchCursor ahead = run(n + 1).probe.home_lines();
      run(n).probe.probe(ahead);
      if (n >= 1) {
        run(n - 1).probe.resolve();
        if (lag_ == 2) {
          ahead.append_rows(run(n - 1).probe.rows(), worker.touched);
        }
      }
      if (n >= lag_) {
        Run& ready = run(n - lag_);
        ready.probe.resolve();  // again: the previous run may have moved its rows
        if (noted_ != nullptr) {
          note(ready);
        }
        worker.use(ready.probe, ready.first, ahead);
        for (Lock& lock : std::span(ready.locks).first(std::exchange(ready.lock_count, 0))) {
          lock = Lock();
        }
      }
      ahead.drain();
    }
  }

 private:
  // The locks of a few runs, held at a time, stay below TSan's limit of 64.
  static constexpr std::size_t kMaxSlots = std::is_same_v<Lock, NoLock> ? Probe::kMaxTables : 12;

  struct Run {
    explicit Run(const Layout& layout) : probe(layout) { probe.start(nullptr); }
    Probe probe;
    std::size_t first = 0;  // in the batch
    std::size_t lock_count = 0;
    std::array<Lock, kMaxSlots> locks;  // of the slots that end in this run
  };

  Run& run(std::size_t n) noexcept { return runs_[n % runs_.size()]; }

  template <class Worker>
  void load(Run& run, Worker& worker) {
    run.first = next_;
    run.probe.start(hashes_.data() + next_);
    std::size_t room = max_rows_;
    while (room != 0 && next_ != end_ && run.probe.parts().size() != kMaxSlots) {
      if (offsets_[slot_ + 1] <= next_) {
        slot_ = index_of(layout_.slots.of(hashes_[next_])) - first_slot_;
      }
      SlotState& slot = *slots_[slot_];
      const std::size_t last = offsets_[slot_ + 1];
      if (next_ == offsets_[slot_]) {
        prefetch_header(slot_ + 2);
        lock_ = Lock(slot.lock);
        worker.enter(slot, hashes_.subspan(next_, last - next_));
        knows_ = known_ != nullptr;
      }
      // A slot that is unknown stays so: its first runs may be recorded before its last is loaded.
      knows_ = knows_ && known_->knows(slot_, slot.table);
      const std::size_t count = std::min(room, last - next_);
      if (knows_) {
        run.probe.add_known(slot.table, known_->rows(next_, count));
      } else {
        run.probe.prepare(slot.table, count);
      }
      next_ += count;
      room -= count;
      if (next_ == last) {
        run.locks[run.lock_count++] = std::move(lock_);
      }
    }
  }

  void note(Run& run) noexcept {
    for (const Probe::Part& part : run.probe.parts()) {
      if (!part.known) {
        noted_->note(index_of(layout_.slots.of(hashes_[run.first + part.begin])) - first_slot_, *part.table,
                     run.first + part.begin, run.probe.rows().subspan(part.begin, part.end - part.begin));
      }
    }
  }

  // Prefetches a slot's lock and its table's header, which would otherwise miss the cache one after the
  // other.
  void prefetch_header(std::size_t slot) const noexcept {
    const SlotState& state = *slots_[std::min(slot, slots_.size() - 1)];
    const auto* const header = reinterpret_cast<const std::byte*>(&state);
    prefetch(header);
    if (lag_ == 2) {
      prefetch(header + kCacheLine);
    }
    if constexpr (!std::is_same_v<Lock, NoLock>) {
      prefetch(reinterpret_cast<const std::byte*>(&state.own));
    }
  }

  std::span<const std::unique_ptr<SlotState>> slots_;
  std::size_t first_slot_;  // its number in the table
  const Layout& layout_;
  const RowLocations* known_;
  RowLocations* noted_;
  std::span<const std::uint64_t> hashes_;
  std::span<const std::uint64_t> offsets_;
  std::size_t max_rows_;
  std::size_t lag_;
  std::size_t slot_ = 0;
  bool knows_ = false;    // whether known_ has the rows of that slot
  std::size_t next_ = 0;  // of the hashes
  std::size_t end_ = 0;
  Lock lock_;  // of a slot that continues in the next run
  std::array<Run, 4> runs_;
};

}  // namespace shoal
