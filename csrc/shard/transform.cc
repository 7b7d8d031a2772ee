// Operations on whole slots of a Shard: reading rows in hash order, and transforming all weights in place.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/noise.h"
#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

namespace {

constexpr std::uint64_t kTransformSeed = 0x7765696768ULL;  // separates its rounding noise from that of pushes

}  // namespace

void Shard::read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const {
  check_process();
  at(slot);
  with_slots(index_of(slot), index_of(slot) + 1, false, [&](std::size_t, std::size_t) {
    read_slot_in_memory(slot, true, hashes, weights);
    return true;
  });
}

void Shard::read_slot_in_memory(Slot slot, bool is_ordered, std::vector<std::uint64_t>& hashes,
                                std::vector<float>& weights) const {
  check_process();
  const SlotState& state = at(slot);
  const std::shared_lock lock(state.lock);
  if (is_ordered) {
    return read_entries(state.table.entries(), hashes, weights);
  }
  std::vector<SlotTable::Entry> entries;
  entries.reserve(state.table.size());
  state.table.each_row([&](std::uint64_t hash, const std::byte* row) { entries.push_back({hash, row}); });
  read_entries(entries, hashes, weights);
}

void Shard::read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                         std::vector<float>& weights) const {
  hashes.resize(entries.size());
  weights.resize(entries.size() * rows_.dim());
  std::vector<std::byte*> rows(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    hashes[i] = entries[i].hash;
    rows[i] = const_cast<std::byte*>(entries[i].row);  // read only
  }
  weights_of(rows, weights.data());
}

void Shard::weights_of(std::span<std::byte* const> rows, float* weights) const {
  Workspace work(rows_);
  std::visit(
      [&](const auto& rule) {
        for (std::size_t i = 0; i < rows.size(); i += work.most) {
          const auto some = rows.subspan(i, std::min(work.most, rows.size() - i));
          PrefetchCursor none;
          if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
            const Block block = work.block(some.size(), rows_.dim());
            rows_.gather(some, block, none);
            rule.read(block, weights + i * rows_.dim());
          } else {
            rows_.read_weights(some, weights + i * rows_.dim(), none);
          }
        }
      },
      spec_.optimizer.rule());
}

std::vector<std::size_t> Shard::transform_weights(std::size_t first, std::size_t end,
                                                  const std::function<void(std::span<float>)>& change) {
  check_process();
  check_slots(first, end);
  const std::size_t dim = rows_.dim();
  const auto writing = enter();
  const std::uint64_t shared = step_noise(spec_.seed ^ kTransformSeed, step());
  std::vector<std::size_t> moved(end - first);
  std::atomic<std::uint64_t> dropped{0};
  const auto transform_slot = [&](const auto& rule, std::size_t slot, Workspace& work, std::span<float> old) {
    if (saving_.active) {
      const std::size_t rows = [&] {
        const std::shared_lock counting(tables_[slot - first_]->lock);
        return tables_[slot - first_]->table.size();
      }();
      wait_for_save_of_slot(rows);
    }
    const std::unique_lock lock(tables_[slot - first_]->lock);
    before_change_of_all(*tables_[slot - first_]);
    std::array<std::uint64_t, Probe::kMax> hashes;
    std::array<std::byte*, Probe::kMax> pointers;
    std::size_t count = 0;
    const auto flush = [&] {
      const auto rows = std::span<std::byte* const>(pointers).first(std::exchange(count, 0));
      const Block block = work.block(rows.size(), dim);
      float* const fresh = block.grads;  // there is no gradient
      PrefetchCursor none;
      rows_.gather(rows, block, none);
      if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
        rule.read(block, old.data());
      } else {
        std::copy_n(block.columns[0], block.size(), old.data());
      }
      std::copy_n(old.data(), block.size(), fresh);
      change({fresh, block.size()});
      for (std::size_t r = 0; r < rows.size(); ++r) {
        work.moves()[r] =
            std::memcmp(fresh + r * dim, old.data() + r * dim, dim * sizeof(float)) != 0 ? 1U : 0U;
        work.finite()[r] = 1;
      }
      if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
        rule.move(block, old.data(), fresh);
      } else {
        std::copy_n(fresh, block.size(), block.columns[0]);
      }
      mark_finite(block.columns[0], rows.size(), dim, work.finite());
      for (std::size_t r = 0; r < rows.size(); ++r) {
        dropped.fetch_add(work.moves()[r] & (work.finite()[r] ^ 1U), std::memory_order_relaxed);
        work.moves()[r] &= work.finite()[r];
        moved[slot - first] += work.moves()[r];
      }
      fill_noise({hashes.data(), rows.size()}, dim, shared, work.noise);
      rows_.scatter(block, {work.moves(), rows.size()}, rows, none);
    };
    tables_[slot - first_]->table.each_row([&](std::uint64_t hash, std::byte* row) {
      hashes[count] = hash;
      pointers[count] = row;
      if (++count == work.most) {
        flush();
      }
    });
    flush();
  };
  const Partition partition{end - first,
                            parts_for(end - first, 1, pool_.threads() == 1 ? 1 : 4 * pool_.threads())};
  std::visit(
      [&](const auto& rule) {
        pool_.run(partition.parts, [&](std::size_t part) {
          Workspace work(rows_);
          std::vector<float> old(work.elements);
          for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
            transform_slot(rule, first + s, work, old);
          }
        });
      },
      spec_.optimizer.rule());
  nonfinite_rows_.fetch_add(dropped.load(), std::memory_order_relaxed);
  return moved;
}

}  // namespace shoal
