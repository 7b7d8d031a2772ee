// ProbePipeline: one thread's way through its part of a batch, slot after slot, several runs of rows under way.
//
//   run n + 1   its slots are locked, its hashes' lines worked out
//   run n       looks at its lines, which were asked for a step before, and asks for those of run n + 1
//   run n - 1   follows the few that its lines did not settle
//   run n - 1   its rows are used, and more lines of run n + 1 asked for; wide rows, which stand in another place again, a
//               step later: while those of run n - 2 are used, those of run n - 1 are asked for, one for one. (All of a run's
//               rows at once, as it is settled, were 192 lines of which the machine keeps two dozen under way: a pull of rows
//               of 128 bytes took an eighth longer.)
//
// So memory always has something to do, and nobody waits for it: with one run at a time, and a run ending with its slot,
// a batch of 65,536 keys went at two thirds of the speed.
//
// Locks. A slot is locked when its first hash is loaded and released when the run with its last one has been used: some
// neighbouring slots at a time, in ascending order. Where all slots have one lock the caller holds it already, and the ProbePipeline
// is one of NoLock: a call of a thousand keys comes by as many slots, and locking each took a fifth of it.

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
#include "policy/admission.h"
#include "shard/row_locations.h"
#include "table/dirty_ranges.h"
#include "table/pre_image_log.h"
#include "table/probe.h"
#include "table/slot_table.h"

namespace shoal {

// A slot's table and its lock, which may be that of all slots.
struct alignas(kCacheLine) SlotState {
  SlotState(const Layout& layout, Slot slot, Chunks& chunks, std::shared_mutex* of_all)
      : lock(of_all != nullptr ? *of_all : own), table(layout, slot, chunks) {}
  // What a batch needs that changes no more than rows is in the first line, and where wide rows stand in the second.
  std::shared_mutex& lock;
  bool fills = false;    // whether many of the rows that the last batch changed were not there
  bool watched = false;  // whether somebody wants to know what changes, before it does (shard/snapshot.h)
  SlotTable table;
  std::unique_ptr<AdmissionFilter> filter;  // null where the table admits all keys
  std::unique_ptr<PreImageLog> pre_images;  // while the slot is to be saved as it was
  std::size_t kept = 0;                     // bytes of what was kept for that, when rows changed last
  // What has changed since a save, and since an export, that is the base of deltas: null where there is none. While the
  // next one of them is under way, what had changed at its moment stands apart. Admission filters are saved, and not exported.
  struct Since {
    std::unique_ptr<DirtyRanges> now;
    std::unique_ptr<DirtyRanges> then;
  };
  std::array<Since, kPurposes> changed;
  bool filter_changed = false;
  bool filter_changed_then = false;

  Since& since(Purpose purpose) noexcept { return changed[static_cast<std::size_t>(purpose)]; }
  const Since& since(Purpose purpose) const noexcept { return changed[static_cast<std::size_t>(purpose)]; }
  bool is_followed() const noexcept {
    return std::ranges::any_of(changed, [](const Since& since) { return since.now != nullptr; });
  }
  alignas(kCacheLine) std::shared_mutex own;
};

// For slots that are locked already.
struct NoLock {
  NoLock() = default;
  explicit NoLock(std::shared_mutex& /*of_slot*/) noexcept {}
};

// Lock is std::shared_lock or std::unique_lock of a slot's mutex, or NoLock. A Worker is called in the order of the batch:
//   enter(slot, hashes)      a slot is locked, and nothing of it has been looked at; it may insert
//   use(run, first, ahead)   the rows of a run that begins at `first`, null where there are none; it may insert, and
//                            asks for lines of `ahead` now and then, and for a row of it with each row where rows are wide
//   touched                  how many bytes of each row it uses, from the front
template <class Lock>
class ProbePipeline {
 public:
  // Slot s has the hashes [offsets[s], offsets[s + 1]). At most `most` rows a run. Rows that `known` knows are not searched,
  // and those that are found are noted in `noted`.
  ProbePipeline(std::span<const std::unique_ptr<SlotState>> slots, const Layout& layout,
                std::span<const std::uint64_t> hashes, std::span<const std::uint64_t> offsets,
                std::size_t most, const RowLocations* known = nullptr, RowLocations* noted = nullptr)
      : slots_(slots),
        layout_(layout),
        known_(known),
        noted_(noted),
        hashes_(hashes),
        offsets_(offsets),
        most_(std::min(most, Probe::kMax)),
        lag_(layout.narrow ? 1 : 2),
        runs_{Run(layout), Run(layout), Run(layout), Run(layout)} {}

  // Walks the slots [first, end).
  template <class Worker>
  void walk(std::size_t first, std::size_t end, Worker& worker) {
    slot_ = first;
    next_ = offsets_[first];
    end_ = offsets_[end];
    load(run(0), worker);
    run(0).probe.home_lines().drain();
    // The last runs are empty: they push the others out.
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
        ready.probe.resolve();  // again: the run before may have moved its rows
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
  // A few runs' locks, held at a time, stay below the 64 that TSan knows.
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
    std::size_t room = most_;
    while (room != 0 && next_ != end_ && run.probe.parts().size() != kMaxSlots) {
      while (offsets_[slot_ + 1] <= next_) {
        ++slot_;
      }
      SlotState& slot = *slots_[slot_];
      const std::size_t last = offsets_[slot_ + 1];
      if (next_ == offsets_[slot_]) {
        prefetch_header(slot_ + 2);
        lock_ = Lock(slot.lock);
        worker.enter(slot, hashes_.subspan(next_, last - next_));
        knows_ = known_ != nullptr;
      }
      // Once unknown, a slot stays so: its first runs may be noted before the last is loaded.
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
        noted_->note(index_of(layout_.slots.of(hashes_[run.first + part.begin])), *part.table,
                     run.first + part.begin, run.probe.rows().subspan(part.begin, part.end - part.begin));
      }
    }
  }

  // A slot's lock and what a search needs of its table would miss the cache one after the other.
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
  const Layout& layout_;
  const RowLocations* known_;
  RowLocations* noted_;
  std::span<const std::uint64_t> hashes_;
  std::span<const std::uint64_t> offsets_;
  std::size_t most_;
  std::size_t lag_;
  std::size_t slot_ = 0;
  bool knows_ = false;    // where the rows of that slot are
  std::size_t next_ = 0;  // of the hashes
  std::size_t end_ = 0;
  Lock lock_;  // of the slot that has begun and not ended
  std::array<Run, 4> runs_;
};

}  // namespace shoal
