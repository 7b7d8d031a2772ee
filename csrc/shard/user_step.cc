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
#include <cstring>

#include "shard/user_arrays.h"
#include "shard/walk.h"

namespace shoal {

namespace {

// Elements of each array in a chunk. A call takes a few microseconds in addition to the arithmetic; arrays of
// 128 KiB stay in the second-level cache (bench/table.md, "Optimizers in Python").
constexpr std::size_t kChunkElements = 32768;

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

  // Besides the rows, for each thread the gradients of a chunk.
  const std::size_t chunk = std::max<std::size_t>(kChunkElements / dim, 1);  // rows
  const std::size_t chunk_grads = std::min(chunk, n) * dim;
  UserArrays arrays(core_.rows, n, core_.pool.threads() * chunk_grads);
  arrays.claim(core_.user_rows);

  // No thread moves rows meanwhile, so they are found and read without the locks of their slots.
  RowLocations found =
      locations != nullptr && locations->is_for(core_.number) ? *locations : RowLocations(batch.hashes);
  core_.known(batch, &found);
  core_.find<NoLock>(batch, found, 0, core_.states.size());
  const auto read_rows = [&](const Block& block, std::size_t first, Workspace& work) {
    std::array<std::byte*, Probe::kMax> rows;
    for (std::size_t r = 0; r < block.rows; r += work.max_rows) {
      const auto run = found.rows(first + r, std::min(work.max_rows, block.rows - r));
      for (std::size_t i = 0; i < run.size(); ++i) {
        rows[i] = run[i];
        if (rows[i] == nullptr) {
          rows[i] = core_.initial_row.at(batch.hashes[first + r + i], work.initial + i * core_.rows.bytes());
        }
      }
      const std::size_t next = std::min(r + work.max_rows, block.rows);
      PrefetchCursor ahead;
      ahead.append_rows(found.rows(first + next, std::min(work.max_rows, block.rows - next)),
                        core_.rows.bytes());
      core_.rows.gather(std::span(rows).first(run.size()), arrays.block(first + r, run.size()), ahead);
      ahead.drain();
    }
  };

  const std::size_t chunks = (n + chunk - 1) / chunk;
  const Partition partition{chunks, std::min(chunks, core_.pool.threads())};
  core_.pool.run(partition.parts, [&](std::size_t part) {
    Workspace work(core_.rows);
    for (std::size_t c = partition.begin(part); c < partition.begin(part + 1); ++c) {
      const std::size_t first = c * chunk;
      Block block = arrays.block(first, std::min(chunk, n - first));
      block.grads = arrays.extra() + part * chunk_grads;
      block.step = step;
      read_rows(block, first, work);
      const float* const from = slopes(first, block.rows, block.grads);
      if (from != block.grads) {
        std::memcpy(block.grads, from, block.size() * sizeof(float));
      }
      mark_moving(block.grads, block.rows, dim, arrays.moves() + first);
      std::fill_n(arrays.finite() + first, block.rows, 1U);
      mark_finite(block.grads, block.rows, dim, arrays.finite() + first);
      if (core_.spec.optimizer.clip().active()) {
        core_.spec.optimizer.clip().apply(block);
      }
      rule.step(block, core_.user_rows);
    }
  });

  const auto budget_lock = core_.budget.lock();
  return write_rows(batch, occurrences, stepped, &found, nullptr, [&](const Change& now, const auto& run) {
    run([&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
      Block block = arrays.block(first, rows.size());
      block.noise = work.noise;
      if (core_.rows.dtype() != Dtype::kFloat32) {
        fill_noise(batch.hashes.subspan(first, rows.size()), dim, now.noise, work.noise);
      }
      return core_.rows.scatter_finite(block, arrays.moves() + first, arrays.finite() + first, rows, ahead);
    });
  });
}

}  // namespace shoal
