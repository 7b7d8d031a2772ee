// A change of all weights of slots in place.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/noise.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

namespace {

constexpr std::uint64_t kTransformSeed = 0x7765696768ULL;  // separates its rounding noise from that of pushes

}  // namespace

std::vector<std::size_t> transform_weights(Shard& shard, std::size_t first, std::size_t end,
                                           const std::function<void(std::span<float>)>& change) {
  ShardCore& core = shard.core();
  core.owner.check();
  core.check_slots(first, end);
  const std::size_t dim = core.rows.dim();
  const auto writing = core.writers.enter();
  const std::uint64_t shared = step_noise(core.spec.seed ^ kTransformSeed, shard.step());
  std::vector<std::size_t> moved(end - first);
  std::atomic<std::uint64_t> dropped{0};
  const auto transform_slot = [&](const auto& rule, std::size_t slot, Workspace& work, std::span<float> old) {
    if (core.changes.has_snapshot()) {
      const std::size_t rows = [&] {
        const std::shared_lock counting(core.states[slot - core.first]->lock);
        return core.states[slot - core.first]->table.size();
      }();
      core.wait_in_slots(rows);
    }
    const std::unique_lock lock(core.states[slot - core.first]->lock);
    core.changes.before_change_of_all(*core.states[slot - core.first]);
    std::array<std::uint64_t, Probe::kMax> hashes;
    std::array<std::byte*, Probe::kMax> pointers;
    std::size_t count = 0;
    const auto flush = [&] {
      const auto rows = std::span<std::byte* const>(pointers).first(std::exchange(count, 0));
      const Block block = work.block(rows.size(), dim);
      float* const changed = block.grads;  // there is no gradient
      PrefetchCursor none;
      core.rows.gather(rows, block, none);
      if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
        rule.read(block, old.data());
      } else {
        std::copy_n(block.columns[0], block.size(), old.data());
      }
      std::copy_n(old.data(), block.size(), changed);
      change({changed, block.size()});
      for (std::size_t r = 0; r < rows.size(); ++r) {
        work.moves()[r] =
            std::memcmp(changed + r * dim, old.data() + r * dim, dim * sizeof(float)) != 0 ? 1U : 0U;
        work.finite()[r] = 1;
      }
      if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
        rule.move(block, old.data(), changed);
      } else {
        std::copy_n(changed, block.size(), block.columns[0]);
      }
      mark_finite(block.columns[0], rows.size(), dim, work.finite());
      for (std::size_t r = 0; r < rows.size(); ++r) {
        dropped.fetch_add(work.moves()[r] & (work.finite()[r] ^ 1U), std::memory_order_relaxed);
        work.moves()[r] &= work.finite()[r];
        moved[slot - first] += work.moves()[r];
      }
      fill_noise({hashes.data(), rows.size()}, dim, shared, work.noise);
      core.rows.scatter(block, {work.moves(), rows.size()}, rows, none);
    };
    core.states[slot - core.first]->table.each_row([&](std::uint64_t hash, std::byte* row) {
      hashes[count] = hash;
      pointers[count] = row;
      if (++count == work.max_rows) {
        flush();
      }
    });
    flush();
  };
  const Partition partition{
      end - first, parts_for(end - first, 1, core.pool.threads() == 1 ? 1 : 4 * core.pool.threads())};
  std::visit(
      [&](const auto& rule) {
        core.pool.run(partition.parts, [&](std::size_t part) {
          Workspace work(core.rows);
          std::vector<float> old(work.elements);
          for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
            transform_slot(rule, first + s, work, old);
          }
        });
      },
      core.spec.optimizer.rule());
  core.counters.nonfinite_rows.fetch_add(dropped.load(), std::memory_order_relaxed);
  return moved;
}

}  // namespace shoal
