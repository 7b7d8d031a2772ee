// Passes of a Shard over the rows of a batch: split among threads, run by run, for reading and for writing.
// Internal to shard/.
//
//   split    cuts the batch's slots into parts for the pool's threads
//   walk     a ProbePipeline in each part
//   find     only the rows' locations, in the calling thread
//   read     every run of rows; an absent row is replaced by its initial row
//   change   every run of rows; missing rows are created if the admission rule lets them
//   write    a push: change() with room made for its rows before, a step number, and counts
//
// Threads: as the ShardCore's.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <span>

#include "base/noise.h"
#include "shard/expiry.h"
#include "shard/probe_pipeline.h"
#include "shard/row_creator.h"
#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

inline constexpr std::size_t kMinKeysPerThread =
    4096;  // below it, waking another thread costs more than it saves

template <class Work>
void ShardCore::split(const SlotSlices& batch, const Work& work) const {
  const std::size_t parts =
      parts_for(batch.hashes.size(), kMinKeysPerThread, pool.threads() == 1 ? 1 : 4 * pool.threads());
  if (parts == 1) {
    return work(0, states.size());
  }
  const Partition partition{batch.hashes.size(), parts};
  const auto first_place = [&](std::size_t part) {  // the first slot that starts in the part or after it
    return part == parts
               ? states.size()
               : static_cast<std::size_t>(
                     std::lower_bound(batch.offsets.begin(), batch.offsets.end() - 1, partition.begin(part)) -
                     batch.offsets.begin());
  };
  pool.run(parts, [&](std::size_t part) { work(first_place(part), first_place(part + 1)); });
}

template <class Lock, class MakeWorker>
void ShardCore::walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const {
  const auto walk_by = [&]<class PipelineLock>() {
    split(batch, [&](std::size_t begin, std::size_t end) {
      auto worker = make_worker();
      ProbePipeline<PipelineLock>(states, first, layout, batch.hashes, batch.offsets, worker.work.max_rows,
                                  known.before, known.after)
          .walk(begin, end, worker);
    });
  };
  if (common_lock != nullptr) {
    const Lock lock(*common_lock);
    walk_by.template operator()<NoLock>();
  } else {
    walk_by.template operator()<Lock>();
  }
}

template <class Lock>
void ShardCore::find(const SlotSlices& batch, RowLocations& locations, std::size_t begin,
                     std::size_t end) const {
  struct Finder {
    std::size_t touched = 0;

    void enter(SlotState&, std::span<const std::uint64_t>) {}
    void use(Probe& /*run*/, std::size_t /*first*/, PrefetchCursor& ahead) const noexcept { ahead.drain(); }
  };
  Finder finder;
  ProbePipeline<Lock>(states, first, layout, batch.hashes, batch.offsets, Probe::kMax, &locations, &locations)
      .walk(begin, end, finder);
}

template <class Use>
void Shard::read(const SlotSlices& batch, RowLocations* locations, std::size_t touched, const Use& use,
                 ShardScratch* scratch) const {
  const ShardCore::Turn turn = core_.bring(batch, locations, RowSource::Use::kReads);
  using Lock = std::shared_lock<std::shared_mutex>;
  struct Reader {
    const ShardCore& core;
    const SlotSlices& batch;
    std::size_t touched;
    const Use& use_rows;
    Workspace work;

    void enter(SlotState&, std::span<const std::uint64_t>) {}

    void use(Probe& run, std::size_t first, PrefetchCursor& ahead) {
      const std::span<std::byte*> rows = run.rows();
      for (std::size_t r = 0; r < rows.size(); ++r) {
        if (rows[r] == nullptr) [[unlikely]] {
          rows[r] = core.initial_row.at(batch.hashes[first + r], work.initial + r * core.rows.bytes());
        }
      }
      use_rows(work, rows, first, ahead);
    }
  };
  core_.walk<Lock>(batch, core_.known(batch, locations), [&] {
    return Reader{core_, batch, touched, use, Workspace(core_.rows, core_.usable(scratch))};
  });
}

template <class Use>
void Shard::change(const SlotSlices& batch, const InsertTerms& terms, const ShardCore::Known& known,
                   const Use& use, ShardScratch* scratch) {
  using Lock = std::unique_lock<std::shared_mutex>;
  std::atomic<std::uint64_t> created{0};
  std::atomic<std::uint64_t> refused{0};
  struct RowMutator {
    ShardCore& core;
    const Use& use_rows;
    std::atomic<std::uint64_t>& created;
    std::atomic<std::uint64_t>& refused;
    Workspace work;
    RowCreator creator;
    std::size_t touched = core.rows.bytes();

    void enter(SlotState& slot, std::span<const std::uint64_t> hashes) {
      core.changes.before_change(slot, hashes);
      if (slot.fills && !creator.terms().asks) {
        count(creator.create_all(slot, hashes));
      }
    }

    void use(Probe& run, std::size_t first, PrefetchCursor& ahead) {
      const auto& [now, asks, counts] = creator.terms();
      count(creator.create(run, first));
      std::span<std::byte* const> rows = run.rows();
      std::array<std::byte*, Probe::kMax> filled;
      if (asks) {
        // Waiting keys get a row that is discarded, so that a step has no gaps.
        std::ranges::copy(rows, filled.begin());
        for (std::size_t r = 0; r < rows.size(); ++r) {
          if (rows[r] == nullptr) {
            filled[r] = work.initial + r * core.rows.bytes();
            std::memset(filled[r], 0, core.rows.bytes());
          }
        }
      }
      use_rows(work, asks ? std::span<std::byte* const>(filled).first(rows.size()) : rows, first, ahead);
      if (core.rows.metadata().any()) {
        core.see(rows, counts.empty() ? counts : counts.subspan(first, rows.size()), now.clock);
      }
    }

    void count(std::size_t rows) {
      if (rows != 0) {
        created.fetch_add(rows, std::memory_order_relaxed);
      }
      if (const std::uint64_t occurrences = creator.take_refused(); occurrences != 0) {
        refused.fetch_add(occurrences, std::memory_order_relaxed);
      }
    }
  };
  core_.walk<Lock>(batch, known, [&] {
    return RowMutator{core_,
                      use,
                      created,
                      refused,
                      Workspace(core_.rows, core_.usable(scratch)),
                      RowCreator(core_, batch, terms)};
  });
  core_.counters.refused.fetch_add(refused.load(), std::memory_order_relaxed);
  const std::uint64_t before =
      core_.counters.rows_created.fetch_add(created.load(), std::memory_order_relaxed);
  if (std::bit_width(before) != std::bit_width(before + created.load())) {
    // Slots that outgrow the heap leave it fragmented, so it is trimmed then. Twice is enough: trimming also
    // returns the working memory of batches, which comes back as new pages.
    const std::size_t slot_bytes =
        (before + created.load()) * (sizeof(std::uint64_t) + core_.rows.bytes()) / core_.states.size();
    if (slot_bytes >= Region::kMapped / 2 && slot_bytes < 2 * Region::kMapped) {
      trim_heap();
    }
  }
}

template <class Body>
std::uint64_t Shard::write_rows(const SlotSlices& batch, const OccurrenceCounts& occurrences,
                                std::size_t* stepped, const RowLocations* locations, ShardScratch* scratch,
                                const Body& body) {
  InsertTerms terms{.now = {.clock = table_clock(occurrences.clock)},
                    .asks = !core_.admission.admits_all(),
                    .counts = occurrences.counts};
  make_room(core_, batch, terms);
  const std::uint64_t step = core_.step.fetch_add(1, std::memory_order_relaxed) + 1;
  terms.now.step = step;
  std::atomic<std::uint64_t> dropped{0};
  body(
      Change{.step = step, .noise = step_noise(core_.spec.seed, step), .clock = terms.now.clock},
      [&](const auto& use) {
        change(
            batch, terms,
            {.before = locations != nullptr && locations->is_for(core_.number) ? locations : nullptr},
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const std::size_t bad = use(work, rows, first, ahead);
              if (stepped != nullptr) {
                *stepped = first + rows.size();
              }
              if (bad != 0) {
                dropped.fetch_add(bad, std::memory_order_relaxed);
              }
            },
            scratch);
      });
  enforce_max_rows(core_, batch, terms.now.clock);
  core_.counters.pushes.fetch_add(1, std::memory_order_relaxed);
  core_.counters.rows_pushed.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
  core_.counters.nonfinite_rows.fetch_add(dropped.load(), std::memory_order_relaxed);
  return step;
}

}  // namespace shoal
