// A push to a table whose optimizer is a UserRule.
//
// Algorithm. Three passes, because the function may fail, and must not run with slots locked:
//
//   1. find     the addresses of the batch's rows
//   2. step     rows are copied to arrays, in hash order, and the function steps them, a chunk that fits the
//               cache at a time; a key without a row has its initial row
//   3. write    missing rows are created, and rows overwritten whose gradient is not zero and whose numbers
//               are all finite
//
// If the function throws, nothing was changed: no row, no admission count, no step number. Other writers of
// the table wait meanwhile; readers do not, and see rows as they were, or as they are after the third pass
// has reached their slot.
//
// Chunks depend on the batch alone. A function that treats each row by itself gives equal bits for any number
// of threads, slots and servers.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include "base/noise.h"
#include "shard/expiry.h"
#include "shard/walk.h"

namespace shoal {

namespace {

// Elements of each array in a chunk. A call takes a few microseconds in addition to the arithmetic; arrays of
// 128 KiB stay in the second-level cache (bench/table.md, "Optimizers in Python").
constexpr std::size_t kChunkElements = 32768;

// The arrays of a batch, in one piece of memory:
//
//   columns     columns x n x dim floats
//   row state   n floats if there is one
//   gradients   for each thread, those of a chunk
//   flags       n moves, n finite
struct UserRows {
  UserRows(const Rows& rows, std::size_t size, std::size_t threads)
      : n(size),
        dim(rows.dim()),
        columns(rows.columns()),
        chunk(std::max<std::size_t>(kChunkElements / dim, 1)),
        row_state_at(columns * n * dim),
        grads_at(row_state_at + (rows.has_row_state() ? n : 0)),
        flags_at(grads_at + threads * std::min(chunk, n) * dim) {}

  std::size_t bytes() const noexcept { return (flags_at + 2 * n) * sizeof(float); }

  // The rows from number `first` on.
  Block block(std::size_t first, std::size_t rows) const noexcept {
    Block block{.rows = rows,
                .dim = dim,
                .grads = nullptr,
                .columns = {},
                .row_state = floats + row_state_at + first,
                .noise = nullptr,
                .step = 0};
    for (std::size_t k = 0; k < columns; ++k) {
      block.columns[k] = floats + (k * n + first) * dim;
    }
    return block;
  }
  float* grads(std::size_t thread) const noexcept {
    return floats + grads_at + thread * std::min(chunk, n) * dim;
  }
  std::uint32_t* moves() const noexcept { return reinterpret_cast<std::uint32_t*>(floats + flags_at); }
  std::uint32_t* finite() const noexcept { return moves() + n; }

  std::size_t n;
  std::size_t dim;
  std::size_t columns;
  std::size_t chunk;  // rows
  std::size_t row_state_at;
  std::size_t grads_at;
  std::size_t flags_at;
  float* floats = nullptr;
};

}  // namespace

std::uint64_t Shard::step_user(const UserRule& rule, const SlotSlices& batch, const Slopes& slopes,
                               const OccurrenceCounts& occurrences, std::size_t* stepped,
                               RowLocations* locations) {
  const std::size_t n = batch.hashes.size();
  const std::size_t dim = core_.rows.dim();
  core_.changes.wait(n);
  const ShardCore::Turn turn = core_.bring(batch, locations, RowSource::Use::kCreates);
  const auto writing = core_.writers.enter_alone();
  const std::uint64_t step = this->step() + 1;

  UserRows all(core_.rows, n, core_.pool.threads());
  if (core_.user_rows == nullptr ||
      core_.user_rows.use_count() != 1) {  // arrays of an earlier step are still in use
    core_.user_rows = std::make_shared<Buffer<std::byte>>();
  }
  all.floats = reinterpret_cast<float*>(core_.user_rows->claim(all.bytes()).data());

  // No thread moves rows meanwhile, so they are found and read without the locks of their slots.
  RowLocations found =
      locations != nullptr && locations->is_for(core_.number) ? *locations : RowLocations(batch.hashes);
  core_.known(batch, &found);
  core_.find<NoLock>(batch, found, 0, core_.states.size());
  const auto read_rows = [&](const Block& block, std::size_t first, Workspace& work) {
    std::array<std::byte*, Probe::kMax> rows;
    for (std::size_t r = 0; r < block.rows; r += work.most) {
      const auto some = found.rows(first + r, std::min(work.most, block.rows - r));
      for (std::size_t i = 0; i < some.size(); ++i) {
        rows[i] = some[i];
        if (rows[i] == nullptr) {
          rows[i] = core_.initial_row.at(batch.hashes[first + r + i], work.initial + i * core_.rows.bytes());
        }
      }
      const std::size_t next = std::min(r + work.most, block.rows);
      PrefetchCursor ahead;
      ahead.append_rows(found.rows(first + next, std::min(work.most, block.rows - next)), core_.rows.bytes());
      core_.rows.gather(std::span(rows).first(some.size()), all.block(first + r, some.size()), ahead);
      ahead.drain();
    }
  };

  const std::size_t chunks = (n + all.chunk - 1) / all.chunk;
  const Partition partition{chunks, std::min(chunks, core_.pool.threads())};
  core_.pool.run(partition.parts, [&](std::size_t part) {
    Workspace work(core_.rows);
    for (std::size_t c = partition.begin(part); c < partition.begin(part + 1); ++c) {
      const std::size_t first = c * all.chunk;
      Block block = all.block(first, std::min(all.chunk, n - first));
      block.grads = all.grads(part);
      block.step = step;
      read_rows(block, first, work);
      const float* const from = slopes(first, block.rows, block.grads);
      if (from != block.grads) {
        std::memcpy(block.grads, from, block.size() * sizeof(float));
      }
      mark_moving(block.grads, block.rows, dim, all.moves() + first);
      std::fill_n(all.finite() + first, block.rows, 1U);
      mark_finite(block.grads, block.rows, dim, all.finite() + first);
      if (core_.spec.optimizer.clip().active()) {
        core_.spec.optimizer.clip().apply(block);
      }
      rule.step(block, core_.user_rows);
    }
  });

  const auto budget_lock = core_.budget.lock();
  const InsertTerms terms{.now = {.clock = table_clock(occurrences.clock), .step = step},
                          .asks = !core_.admission.admits_all(),
                          .counts = occurrences.counts};
  make_room(core_, batch, terms);
  core_.step.store(step, std::memory_order_relaxed);
  const std::uint64_t shared = step_noise(core_.spec.seed, step);
  std::atomic<std::uint64_t> dropped{0};
  change(batch, terms, {.before = &found},
         [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
           Block block = all.block(first, rows.size());
           block.noise = work.noise;
           if (core_.rows.dtype() != Dtype::kFloat32) {
             fill_noise(batch.hashes.subspan(first, rows.size()), dim, shared, work.noise);
           }
           const std::size_t bad =
               core_.rows.scatter_finite(block, all.moves() + first, all.finite() + first, rows, ahead);
           if (stepped != nullptr) {
             *stepped = first + rows.size();
           }
           if (bad != 0) {
             dropped.fetch_add(bad, std::memory_order_relaxed);
           }
         });
  enforce_max_rows(core_, batch, terms.now.clock);
  core_.counters.pushes.fetch_add(1, std::memory_order_relaxed);
  core_.counters.rows_pushed.fetch_add(n, std::memory_order_relaxed);
  core_.counters.nonfinite_rows.fetch_add(dropped.load(), std::memory_order_relaxed);
  return step;
}

}  // namespace shoal
