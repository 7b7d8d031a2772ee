//   pull     never creates a row; an unseen key reads its initial row
//   push     one optimizer step per row, creating missing rows; a row with an all-zero gradient keeps every
//            bit; a row whose gradient or new value is not finite is left unchanged and counted; a key that
//            the table's admission rule does not admit yet gets no row, and its gradient is dropped
//   assign   sets weights, creating missing rows; existing rows keep their optimizer state
//
// After std::bad_alloc in a push every row is either updated or unchanged: rows before the failing slot are
// updated, others are not. Waiting keys of the failing run may have been counted: if the push is repeated,
// they are admitted early.

#include "shard/shard.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/noise.h"
#include "shard/expiry.h"
#include "shard/walk.h"
#include "shard/workspace.h"

namespace shoal {

namespace {

constexpr std::uint32_t kStateStream = 5;  // a noise stream of its own for the row state

template <class Rule>
std::size_t step_where_stored(const Rule& rule, const InPlace& rows) noexcept {
  if constexpr (requires { rule.step(rows); }) {
    return rule.step(rows);
  } else {
    return 0;  // never asked: dim is 2
  }
}

// Adds changes of whole rows; clears finite[r] where state would be negative.
void add_changes(const Rows& rows, bool derives, const Block& block, const float* changes,
                 std::uint32_t* finite) noexcept {
  const std::size_t floats = rows.floats();
  for (std::size_t r = 0; r < block.rows; ++r) {
    const float* change = changes + r * floats;
    for (std::size_t k = 0; k < rows.columns(); ++k) {
      float* const column = block.columns[k] + r * block.dim;
      for (std::size_t e = 0; e < block.dim; ++e, ++change) {
        // Weights are rounded as the rules round them, sums as accumulators.
        column[e] = k == 0 && !derives
                        ? column[e] + *change
                        : accumulate(column[e], static_cast<double>(*change), block.noise[r * block.dim + e],
                                     static_cast<std::uint32_t>(k));
        finite[r] &= static_cast<std::uint32_t>(k == 0 || column[e] >= 0.0F);
      }
    }
    if (rows.has_row_state()) {
      float& state = block.row_state[r];
      state = accumulate(state, static_cast<double>(*change), block.noise[r * block.dim], kStateStream);
      finite[r] &= static_cast<std::uint32_t>(state >= 0.0F);
    }
  }
}

}  // namespace

void Shard::pause_writers() {
  core_.owner.check();
  ShardCore::Turn turn = core_.turn();
  core_.writers.pause();
  turn.release();  // until resume_writers()
}

void Shard::resume_writers() {
  core_.writers.resume();
  if (core_.source != nullptr) {
    core_.source->unlock();
  }
}

template <class Use>
void Shard::read_weights(const SlotSlices& batch, RowLocations* locations, float* to, const Use& use,
                         ShardScratch* scratch) const {
  std::visit(
      [&](const auto& rule) {
        constexpr bool kDerives = std::remove_cvref_t<decltype(rule)>::kDerivesWeights;
        read(
            batch, locations, kDerives ? core_.rows.bytes() : core_.rows.width(0),
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const Block block = work.block(rows.size(), core_.rows.dim());
              float* const out = to == nullptr ? block.grads : to + first * core_.rows.dim();
              if constexpr (kDerives) {
                core_.rows.gather(rows, block, ahead);
                rule.read(block, out);
              } else {
                core_.rows.read_weights(rows, out, ahead);
              }
              use(std::span<const float>(out, block.size()), first);
            },
            scratch);
      },
      core_.spec.optimizer.rule());
  core_.counters.pulls.fetch_add(1, std::memory_order_relaxed);
  core_.counters.rows_pulled.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
}

void Shard::pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations,
                 ShardScratch* scratch) const {
  core_.check_batch(batch);
  SHOAL_CHECK(weights.size() == batch.hashes.size() * core_.rows.dim(), "rows must be len(keys) x dim");
  read_weights(batch, locations, weights.data(), [](std::span<const float>, std::size_t) {}, scratch);
}

void Shard::pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations) const {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  core_.check_batch(slices);
  SHOAL_CHECK(weights.size() == batch.input_size() * core_.rows.dim(), "rows must be len(keys) x dim");
  read_weights(slices, locations, nullptr, [&](std::span<const float> rows, std::size_t first) {
    batch.expand_some(first, rows, core_.rows.dim(), weights.data());
  });
}

void Shard::locate(const SlotSlices& batch, RowLocations& locations) const {
  core_.check_batch(batch);
  const ShardCore::Turn turn = core_.turn();
  core_.known(batch, &locations);
  if (core_.common_lock != nullptr) {
    const std::shared_lock lock(*core_.common_lock);
    core_.find<NoLock>(batch, locations, 0, core_.states.size());
  } else {
    core_.find<std::shared_lock<std::shared_mutex>>(batch, locations, 0, core_.states.size());
  }
}

bool Shard::prefetch(const SlotSlices& batch, RowLocations* locations) const {
  if (core_.source == nullptr) {
    if (locations != nullptr) {
      locate(batch, *locations);
    }
    return false;
  }
  core_.check_batch(batch);
  const ShardCore::Turn turn = core_.turn();
  core_.source->prefetch(batch, locations);
  return true;
}

void Shard::check_push(const SlotSlices& batch, const OccurrenceCounts& occurrences,
                       const std::size_t* stepped, const RowLocations* locations) const {
  SHOAL_CHECK(occurrences.counts.empty() || occurrences.counts.size() == batch.hashes.size(),
              "a push has one count of occurrences a key: " + std::to_string(batch.hashes.size()) + ", got " +
                  std::to_string(occurrences.counts.size()));
  SHOAL_CHECK(stepped == nullptr || core_.pool.threads() == 1,
              "several threads step rows in an undefined order");
  SHOAL_CHECK(locations == nullptr || locations->is_of(batch.hashes),
              "these row locations are those of another batch");
}

std::uint64_t Shard::step_rows(const SlotSlices& batch, const Slopes& slopes,
                               const OccurrenceCounts& occurrences, std::size_t* stepped,
                               RowLocations* locations, ShardScratch* scratch) {
  check_push(batch, occurrences, stepped, locations);
  if (const auto* const rule = std::get_if<UserRule>(&core_.spec.optimizer.rule())) {
    return step_user(*rule, batch, slopes, occurrences, stepped, locations);
  }
  const std::size_t dim = core_.rows.dim();
  const bool in_place = core_.spec.optimizer.elements() == Elements::kInt64Pairs ||
                        (core_.rows.dtype() == Dtype::kFloat32 && dim >= InPlace::kMinDim &&
                         !core_.spec.optimizer.clip().active());
  const ShardCore::Writing writing = core_.begin_writing(batch, locations, RowSource::Use::kCreates);
  return write_rows(batch, occurrences, stepped, locations, scratch, [&](const Change& now, const auto& run) {
    const double part = static_cast<double>(core_.spec.optimizer.schedule().at(now.clock)) * rate();
    std::visit(
        [&](const auto& given_rule) {
          const auto rule = slowed(given_rule, part);
          // Both return the number of rows that were not finite.
          const auto step_in_place = [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                                         PrefetchCursor& ahead) {
            return step_where_stored(rule, {.rows = rows,
                                            .dim = dim,
                                            .grads = slopes(first, rows.size(), work.floats),
                                            .hashes = batch.hashes.data() + first,
                                            .noise = now.noise,
                                            .step = now.step,
                                            .scratch = work.floats + work.elements,
                                            .ahead = &ahead});
          };
          const auto step_block = [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                                      PrefetchCursor& ahead) {
            Block block = work.block(rows.size(), dim);
            block.step = now.step;
            const float* const given = slopes(first, rows.size(), block.grads);
            if (given != block.grads) {
              std::memcpy(block.grads, given, block.size() * sizeof(float));
            }
            fill_noise(batch.hashes.subspan(first, rows.size()), dim, now.noise, work.noise);
            core_.rows.gather(rows, block, ahead);
            mark_moving(block.grads, block.rows, dim, work.moves());
            std::fill_n(work.finite(), block.rows, 1U);
            mark_finite(block.grads, block.rows, dim, work.finite());
            if (core_.spec.optimizer.clip().active()) {
              core_.spec.optimizer.clip().apply(block);
            }
            rule.step(block);
            return core_.rows.scatter_finite(block, work.moves(), work.finite(), rows, ahead);
          };
          run([&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                  PrefetchCursor& ahead) {
            return in_place ? step_in_place(work, rows, first, ahead) : step_block(work, rows, first, ahead);
          });
        },
        core_.spec.optimizer.rule());
  });
}

std::uint64_t Shard::push(const SlotSlices& batch, std::span<const float> grads,
                          const OccurrenceCounts& occurrences, std::size_t* stepped, RowLocations* locations,
                          ShardScratch* scratch) {
  core_.check_batch(batch);
  SHOAL_CHECK(grads.size() == batch.hashes.size() * core_.rows.dim(), "grads must be len(keys) x dim");
  return step_rows(
      batch,
      [&](std::size_t first, std::size_t /*count*/, float* /*room*/) {
        return grads.data() + first * core_.rows.dim();
      },
      occurrences, stepped, locations, scratch);
}

std::uint64_t Shard::push_per_key(const KeyBatch& batch, std::span<const float> grads,
                                  const OccurrenceCounts& occurrences, RowLocations* locations) {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  core_.check_batch(slices);
  SHOAL_CHECK(grads.size() == batch.input_size() * core_.rows.dim(), "grads must be len(keys) x dim");
  return step_rows(
      slices,
      [&](std::size_t first, std::size_t count, float* room) -> const float* {
        batch.sum_some(first, grads.data(), core_.rows.dim(), {room, count * core_.rows.dim()},
                       core_.spec.optimizer.elements());
        return room;
      },
      occurrences, nullptr, locations, nullptr);
}

std::uint64_t Shard::push_whole(const SlotSlices& batch, std::span<const float> changes,
                                const OccurrenceCounts& occurrences, std::size_t* stepped,
                                ShardScratch* scratch) {
  core_.check_batch(batch);
  check_push(batch, occurrences, stepped, nullptr);
  const std::size_t floats = core_.rows.floats();
  SHOAL_CHECK(core_.spec.optimizer.adds_up(),
              "changes of rows of " + core_.spec.optimizer.name() +
                  " do not add up: push gradients to a table with this optimizer");
  SHOAL_CHECK(changes.size() == batch.hashes.size() * floats,
              "changes must be len(keys) x the numbers of a row");
  RowLocations* locations = nullptr;
  const ShardCore::Writing writing = core_.begin_writing(batch, locations, RowSource::Use::kCreates);
  return write_rows(batch, occurrences, stepped, locations, scratch, [&](const Change& now, const auto& run) {
    run([&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
      const Block block = work.block(rows.size(), core_.rows.dim());
      const float* const added = changes.data() + first * floats;
      fill_noise(batch.hashes.subspan(first, rows.size()), block.dim, now.noise, work.noise);
      core_.rows.gather(rows, block, ahead);
      mark_moving(added, block.rows, floats, work.moves());
      std::fill_n(work.finite(), block.rows, 1U);
      mark_finite(added, block.rows, floats, work.finite());
      add_changes(core_.rows, core_.spec.optimizer.derives_weights(), block, added, work.finite());
      return core_.rows.scatter_finite(block, work.moves(), work.finite(), rows, ahead);
    });
  });
}

void Shard::assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock) {
  core_.check_batch(batch);
  const std::size_t dim = core_.rows.dim();
  SHOAL_CHECK(weights.size() == batch.hashes.size() * dim, "rows must be len(keys) x dim");
  const bool floats = core_.spec.optimizer.elements() == Elements::kFloat32;
  for (std::size_t i = 0; floats && i < weights.size(); ++i) {
    SHOAL_CHECK(is_finite(weights[i]) != 0,
                "weights must be finite: one of them is " + std::to_string(weights[i]));
  }
  RowLocations* locations = nullptr;
  const ShardCore::Writing writing = core_.begin_writing(batch, locations, RowSource::Use::kCreates);
  const std::uint64_t shared = step_noise(core_.spec.seed, 0);
  const InsertTerms terms{.now = {.clock = table_clock(clock)}};
  make_room(core_, batch, terms);
  std::visit(
      [&](const auto& rule) {
        change(
            batch, terms, {},
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const Block block = work.block(rows.size(), dim);
              core_.rows.gather(rows, block, ahead);
              const float* const given = weights.data() + first * dim;
              if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
                rule.write(block, given);
              } else {
                std::memcpy(block.columns[0], given, block.size() * sizeof(float));
              }
              fill_noise(batch.hashes.subspan(first, rows.size()), dim, shared, work.noise);
              std::fill_n(work.moves(), block.rows, 1U);
              core_.rows.scatter(block, {work.moves(), block.rows}, rows, ahead);
            });
      },
      core_.spec.optimizer.rule());
  enforce_max_rows(core_, batch, terms.now.clock);
}

std::size_t Shard::erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot) {
  core_.check_batch(batch);
  RowLocations* locations = nullptr;
  const ShardCore::Writing writing = core_.begin_writing(batch, locations, RowSource::Use::kErases);
  std::atomic<std::size_t> erased{0};
  core_.split(batch, [&](std::size_t first, std::size_t end) {
    for (std::size_t s = first; s < end; ++s) {
      const auto hashes = batch.of(s);
      if (hashes.empty()) {
        continue;
      }
      const std::unique_lock lock(core_.states[s]->lock);
      core_.changes.before_change(*core_.states[s], hashes);
      const auto rows =
          std::ranges::count_if(hashes, [&](auto hash) { return core_.states[s]->table.erase(hash); });
      erased.fetch_add(static_cast<std::size_t>(rows), std::memory_order_relaxed);
      if (!by_slot.empty()) {
        by_slot[s] += static_cast<std::uint32_t>(rows);
      }
      core_.states[s]->table.give_back();
      core_.budget.note(s);
    }
  });
  core_.counters.rows_erased.fetch_add(erased.load(), std::memory_order_relaxed);
  return erased.load();
}

void Shard::contains(const SlotSlices& batch, std::span<std::uint8_t> there) const {
  core_.check_batch(batch);
  SHOAL_CHECK(there.size() == batch.hashes.size(), "the answer takes one byte a key");
  struct Asker {
    std::span<std::uint8_t> there;
    Workspace work;
    std::size_t touched = 0;

    void enter(SlotState&, std::span<const std::uint64_t>) {}

    void use(Probe& run, std::size_t first, PrefetchCursor& /*ahead*/) const noexcept {
      for (std::size_t r = 0; r < run.size(); ++r) {
        there[first + r] = run.rows()[r] != nullptr ? 1 : 0;
      }
    }
  };
  RowLocations* locations = nullptr;
  const ShardCore::Turn turn = core_.bring(batch, locations, RowSource::Use::kReads);
  core_.walk<std::shared_lock<std::shared_mutex>>(batch, core_.known(batch, locations),
                                                  [&] { return Asker{there, Workspace(core_.rows)}; });
}

void Shard::state(const SlotSlices& batch, std::size_t column, std::span<float> values) const {
  core_.check_batch(batch);
  const bool of_row = column == core_.rows.columns();
  SHOAL_CHECK(column < core_.rows.columns() || (of_row && core_.rows.has_row_state()),
              "there is no such column");
  const std::size_t width = of_row ? 1 : core_.rows.dim();
  SHOAL_CHECK(values.size() == batch.hashes.size() * width, "values must be len(keys) x the column's width");
  read(batch, nullptr, core_.rows.bytes(),
       [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         const Block block = work.block(rows.size(), core_.rows.dim());
         core_.rows.gather(rows, block, ahead);
         std::memcpy(values.data() + first * width, of_row ? block.row_state : block.columns[column],
                     rows.size() * width * sizeof(float));
       });
}

void Shard::pull_whole(const SlotSlices& batch, std::span<float> numbers, ShardScratch* scratch) const {
  core_.check_batch(batch);
  const std::size_t dim = core_.rows.dim();
  SHOAL_CHECK(numbers.size() == batch.hashes.size() * core_.rows.floats(),
              "rows must be len(keys) x the numbers of a row");
  read(
      batch, nullptr, core_.rows.bytes(),
      [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
        const Block block = work.block(rows.size(), dim);
        core_.rows.gather(rows, block, ahead);
        float* to = numbers.data() + first * core_.rows.floats();
        for (std::size_t r = 0; r < block.rows; ++r) {
          for (std::size_t k = 0; k < core_.rows.columns(); ++k, to += dim) {
            std::memcpy(to, block.columns[k] + r * dim, dim * sizeof(float));
          }
          if (core_.rows.has_row_state()) {
            *to++ = block.row_state[r];
          }
        }
      },
      scratch);
  core_.counters.pulls.fetch_add(1, std::memory_order_relaxed);
  core_.counters.rows_pulled.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
}

void Shard::metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const {
  core_.check_batch(batch);
  const std::size_t count = core_.rows.metadata().columns();
  SHOAL_CHECK(k < count, "there is no such row metadata");
  SHOAL_CHECK(values.size() == batch.hashes.size(), "values must be len(keys)");
  const std::size_t at = core_.rows.offset(core_.rows.stored() - count + k);
  read(batch, nullptr, core_.rows.bytes(),
       [&](Workspace&, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         for (std::size_t r = 0; r < rows.size(); ++r) {
           ahead.next();
           ahead.next_row();
           std::memcpy(&values[first + r], rows[r] + at, sizeof(std::uint32_t));
         }
       });
}

}  // namespace shoal
