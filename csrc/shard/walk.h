// Passes of a Shard over the rows of a batch: split among threads, run by run, for reading and for writing. Internal to shard/.
//
//   split    cuts the batch's slots into parts for the pool's threads
//   walk     a ProbePipeline in each part
//   find     only the rows' locations, in the calling thread
//   read     every run of rows; an absent row is replaced by its initial row
//   change   every run of rows; missing rows are created if the admission rule lets them
//
// Threads: as the Shard's.

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
#include <utility>

#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

inline constexpr std::size_t kMinKeysPerThread =
    4096;  // below it, waking another thread costs more than it saves

template <class Work>
void Shard::split(const SlotSlices& batch, const Work& work) const {
  const std::size_t parts =
      parts_for(batch.hashes.size(), kMinKeysPerThread, pool_.threads() == 1 ? 1 : 4 * pool_.threads());
  if (parts == 1) {
    return work(0, tables_.size());
  }
  const Partition partition{batch.hashes.size(), parts};
  const auto first_slot = [&](std::size_t part) {  // the first slot that starts in the part or after it
    return part == parts
               ? tables_.size()
               : static_cast<std::size_t>(
                     std::lower_bound(batch.offsets.begin(), batch.offsets.end() - 1, partition.begin(part)) -
                     batch.offsets.begin());
  };
  pool_.run(parts, [&](std::size_t part) { work(first_slot(part), first_slot(part + 1)); });
}

template <class Lock, class MakeWorker>
void Shard::walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const {
  const auto walk_by = [&]<class PipelineLock>() {
    split(batch, [&](std::size_t first, std::size_t end) {
      auto worker = make_worker();
      ProbePipeline<PipelineLock>(tables_, first_, layout_, batch.hashes, batch.offsets, worker.work.most,
                                  known.before, known.after)
          .walk(first, end, worker);
    });
  };
  if (of_all_ != nullptr) {
    const Lock all(*of_all_);
    walk_by.template operator()<NoLock>();
  } else {
    walk_by.template operator()<Lock>();
  }
}

template <class Lock>
void Shard::find(const SlotSlices& batch, RowLocations& locations, std::size_t first, std::size_t end) const {
  struct Finder {
    std::size_t touched = 0;

    void enter(SlotState&, std::span<const std::uint64_t>) {}
    void use(Probe& /*run*/, std::size_t /*first*/, PrefetchCursor& ahead) const noexcept { ahead.drain(); }
  };
  Finder finder;
  ProbePipeline<Lock>(tables_, first_, layout_, batch.hashes, batch.offsets, Probe::kMax, &locations,
                      &locations)
      .walk(first, end, finder);
}

template <class Use>
void Shard::read(const SlotSlices& batch, RowLocations* locations, std::size_t touched, const Use& use,
                 ShardScratch* scratch) const {
  const Turn turn = bring(batch, locations, RowSource::Use::kReads);
  using Lock = std::shared_lock<std::shared_mutex>;
  struct Reader {
    const Shard& shard;
    const SlotSlices& batch;
    std::size_t touched;
    const Use& use_rows;
    Workspace work;

    void enter(SlotState&, std::span<const std::uint64_t>) {}

    void use(Probe& run, std::size_t first, PrefetchCursor& ahead) {
      const std::span<std::byte*> rows = run.rows();
      for (std::size_t r = 0; r < rows.size(); ++r) {
        if (rows[r] == nullptr) [[unlikely]] {
          rows[r] =
              shard.initial_row_.empty() ? work.fresh + r * shard.rows_.bytes() : shard.initial_row_.data();
          if (shard.initial_row_.empty()) {
            shard.fill_initial_row(batch.hashes[first + r], rows[r]);
          }
        }
      }
      use_rows(work, rows, first, ahead);
    }
  };
  walk<Lock>(batch, known(batch, locations),
             [&] { return Reader{*this, batch, touched, use, Workspace(rows_, room_of(scratch))}; });
}

template <class Use>
void Shard::change(const SlotSlices& batch, const InsertContext& how, const Known& known, const Use& use,
                   ShardScratch* scratch) {
  using Lock = std::unique_lock<std::shared_mutex>;
  std::atomic<std::uint64_t> created{0};
  std::atomic<std::uint64_t> refused{0};
  struct RowMutator {
    Shard& shard;
    const SlotSlices& batch;
    const Use& use_rows;
    std::atomic<std::uint64_t>& created;
    std::atomic<std::uint64_t>& refused;
    Workspace work;
    InsertContext context;
    std::size_t touched = shard.rows_.bytes();

    void enter(SlotState& slot, std::span<const std::uint64_t> hashes) {
      shard.before_change(slot, hashes);
      if (slot.fills && !context.asks) {
        count(shard.create_all(slot, hashes, context));
      }
    }

    void use(Probe& run, std::size_t first, PrefetchCursor& ahead) {
      count(shard.create(run, batch, first, context));
      std::span<std::byte* const> rows = run.rows();
      std::array<std::byte*, Probe::kMax> filled;
      if (context.asks) {
        // Waiting keys get a row that is discarded, so that a step has no gaps.
        std::ranges::copy(rows, filled.begin());
        for (std::size_t r = 0; r < rows.size(); ++r) {
          if (rows[r] == nullptr) {
            filled[r] = work.fresh + r * shard.rows_.bytes();
            std::memset(filled[r], 0, shard.rows_.bytes());
          }
        }
      }
      use_rows(work, context.asks ? std::span<std::byte* const>(filled).first(rows.size()) : rows, first,
               ahead);
      if (shard.rows_.metadata().any()) {
        shard.see(rows, context.counts.empty() ? context.counts : context.counts.subspan(first, rows.size()),
                  context.now.clock);
      }
    }

    void count(std::size_t fresh) {
      if (fresh != 0) {
        created.fetch_add(fresh, std::memory_order_relaxed);
      }
      if (context.refused != 0) {
        refused.fetch_add(std::exchange(context.refused, 0), std::memory_order_relaxed);
      }
    }
  };
  walk<Lock>(batch, known, [&] {
    return RowMutator{*this, batch, use, created, refused, Workspace(rows_, room_of(scratch)), how};
  });
  refused_.fetch_add(refused.load(), std::memory_order_relaxed);
  const std::uint64_t before = rows_created_.fetch_add(created.load(), std::memory_order_relaxed);
  if (std::bit_width(before) != std::bit_width(before + created.load())) {
    // Slots that outgrow the heap leave it fragmented, so it is trimmed then. Twice is enough: trimming also returns
    // the working memory of batches, which comes back as fresh pages.
    const std::size_t slot_bytes =
        (before + created.load()) * (sizeof(std::uint64_t) + rows_.bytes()) / tables_.size();
    if (slot_bytes >= Region::kMapped / 2 && slot_bytes < 2 * Region::kMapped) {
      trim_heap();
    }
  }
}

}  // namespace shoal
