//   pull     never creates a row; an unseen key reads its initial row
//   push     one optimizer step per row, creating missing rows; a row with an all-zero gradient keeps every bit; a
//            row whose gradient or new value is not finite is left unchanged and counted; a key that the table's
//            admission rule does not admit yet gets no row, and its gradient is dropped
//   assign   sets weights, creating missing rows; existing rows keep their optimizer state
//
// After std::bad_alloc in a push every row is either updated or unchanged: rows before the failing slot are updated,
// others are not. Waiting keys of the failing run may have been counted: if the push is repeated, they are admitted
// early.

#include "shard/shard.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/noise.h"
#include "shard/walk.h"
#include "shard/workspace.h"

namespace shoal {

namespace {

constexpr std::uint32_t kStateStream = 5;  // a noise stream of its own for the row state

// The caller of the user's code may have locked this table.
void check_not_stepping() {
  SHOAL_CHECK(!is_stepping(),
              "the step of an optimizer, or a function of rows, may not change, save or sweep a table");
}

template <class One>
std::size_t step_where_stored(const One& rule, const InPlace& rows) noexcept {
  if constexpr (requires { rule.step(rows); }) {
    return rule.step(rows);
  } else {
    return 0;  // never asked: dim is 2
  }
}

std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

Shard::Shard(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks, Budget* budget,
             std::size_t first, std::size_t end)
    : spec_(spec),
      slots_(slots),
      first_(first),
      pool_(pool),
      rows_(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata()),
      layout_(rows_.bytes(), slots),
      chunks_(rows_.bytes()),
      admission_(spec.lifecycle.admit(), slots),
      number_(next_number()),
      stamp_(process_stamp()),
      of_all_(locks == Locks::kOne ? std::make_unique<std::shared_mutex>() : nullptr),
      budget_(budget),
      noted_(budget == nullptr ? 0 : std::min(end, slots.count()) - first),
      numbers_(PreImageLog::kNumberBytes, slots) {
  for (const Expiry& rule : spec.lifecycle.expire()) {
    SHOAL_CHECK(rule.kind != Expiry::Kind::kMaxRows || rule.rows >= slots.count(),
                "MaxRows needs at least one row a slot, " + std::to_string(slots.count()) + ", got " +
                    std::to_string(rule.rows) + ": raise it, or make the store with fewer slots");
  }
  end = std::min(end, slots.count());
  tables_.reserve(end - first);
  for (std::size_t s = first; s < end; ++s) {
    const Slot slot{static_cast<std::uint32_t>(s)};
    tables_.push_back(std::make_unique<SlotState>(layout_, slot, chunks_, of_all_.get()));
    if (!admission_.admits_all()) {
      tables_.back()->filter = std::make_unique<AdmissionFilter>(admission_, slot);
    }
  }
  if (spec.init.same_for_all() && spec.dtype == Dtype::kFloat32) {
    std::vector<std::byte> row(rows_.bytes());
    fill_initial_row(0, row.data());
    initial_row_ = std::move(row);
  }
  const auto budget_lock = lock_budget();
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    if (bytes_of(*tables_[s]) > budget->spare(first + s)) {
      throw MemoryBudgetExceededError(
          "the memory budget has no room for a new table, which takes " +
          std::to_string(bytes_of(*tables_[s])) + " bytes of slot " + std::to_string(first + s) +
          " while it is empty: all tables take " + std::to_string(budget->used(first + s)) + " of the " +
          std::to_string(budget->share()) + " bytes that each of " + std::to_string(budget->slots()) +
          " slots has; give the store more memory, close a table, erase rows or sweep");
    }
  }
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    note(s);
  }
}

Shard::~Shard() {
  if (stamp_ == process_stamp()) {  // in a child the parent may hold the budget lock
    leave_budget();
  }
}

// --- the walk ---------------------------------------------------------------------------------------------------

void Shard::check_process() const {
  if (stamp_ != process_stamp()) {
    throw WrongProcessError(
        "this store was made before a fork and belongs to the parent process: make a store of its own in the "
        "child, or "
        "start children with the 'spawn' method");
  }
}

void Shard::check_slots(std::size_t first, std::size_t end) const {
  SHOAL_CHECK(first <= end && first >= first_ && end <= end_slot(), "there are no such slots");
}

SlotState& Shard::at(Slot slot) const {
  SHOAL_CHECK(index_of(slot) >= first_ && index_of(slot) < end_slot(),
              "there is no slot " + std::to_string(index_of(slot)));
  return *tables_[index_of(slot) - first_];
}

void Shard::check_batch(const SlotSlices& batch) const {
  check_process();
  SHOAL_CHECK(batch.offsets.size() == tables_.size() + 1 && batch.offsets.front() == 0 &&
                  batch.offsets.back() == batch.hashes.size(),
              "the batch is cut into " + std::to_string(batch.offsets.size() - 1) +
                  " slots, the store into " + std::to_string(tables_.size()) +
                  ": make it with the store's key_batch()");
}

std::shared_lock<std::shared_mutex> Shard::enter() const {
  check_not_stepping();
  {
    const MutexLock wait(pause_mutex_);
  }
  return std::shared_lock(writers_mutex_);
}

std::unique_lock<std::shared_mutex> Shard::enter_alone() const {
  check_not_stepping();
  const MutexLock hold(pause_mutex_);
  return std::unique_lock(writers_mutex_);
}

Shard::Writing Shard::begin_writing(const SlotSlices& batch, RowLocations*& locations,
                                    RowSource::Use use) const {
  wait_for_save(batch.hashes.size());
  return {.turn = bring(batch, locations, use), .writers = enter(), .budget = lock_budget()};
}

void Shard::pause_writers() {
  check_process();
  Turn turn = this->turn();
  check_not_stepping();
  const MutexLock hold(pause_mutex_);
  writers_mutex_.lock();
  turn.release();  // until resume_writers()
}

void Shard::resume_writers() {
  writers_mutex_.unlock();
  if (source_ != nullptr) {
    source_->unlock();
  }
}

Shard::Known Shard::known(const SlotSlices& batch, RowLocations* locations) const {
  if (locations != nullptr) {
    SHOAL_CHECK(locations->is_of(batch.hashes), "these row locations are those of another batch");
    locations->reset_for(number_, tables_.size());
  }
  return {locations, locations};
}

void Shard::see(std::span<std::byte* const> rows, std::span<const std::uint32_t> counts,
                std::uint32_t now) noexcept {
  const RowMetadata metadata = rows_.metadata();
  std::array<std::uint64_t, kAges> returns{};
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] != nullptr) {
      const std::uint32_t count = counts.empty() ? 1 : counts[r];
      returns[static_cast<std::size_t>(std::bit_width(metadata.see(rows[r], count, now)))] += count;
    }
  }
  if (metadata.has(RowMetadata::Column::kClock)) {
    for (std::size_t age = 0; age < kAges; ++age) {
      if (returns[age] != 0) {
        returns_[age].fetch_add(returns[age], std::memory_order_relaxed);
      }
    }
  }
}

// --- requests ---------------------------------------------------------------------------------------------------

template <class Use>
void Shard::read_weights(const SlotSlices& batch, RowLocations* locations, float* to, const Use& use,
                         ShardScratch* scratch) const {
  std::visit(
      [&](const auto& rule) {
        constexpr bool kDerives = std::remove_cvref_t<decltype(rule)>::kDerivesWeights;
        read(
            batch, locations, kDerives ? rows_.bytes() : rows_.width(0),
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const Block block = work.block(rows.size(), rows_.dim());
              float* const out = to == nullptr ? block.grads : to + first * rows_.dim();
              if constexpr (kDerives) {
                rows_.gather(rows, block, ahead);
                rule.read(block, out);
              } else {
                rows_.read_weights(rows, out, ahead);
              }
              use(std::span<const float>(out, block.size()), first);
            },
            scratch);
      },
      spec_.optimizer.rule());
  pulls_.fetch_add(1, std::memory_order_relaxed);
  rows_pulled_.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
}

void Shard::pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations,
                 ShardScratch* scratch) const {
  check_batch(batch);
  SHOAL_CHECK(weights.size() == batch.hashes.size() * rows_.dim(), "rows must be len(keys) x dim");
  read_weights(batch, locations, weights.data(), [](std::span<const float>, std::size_t) {}, scratch);
}

void Shard::pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations) const {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  check_batch(slices);
  SHOAL_CHECK(weights.size() == batch.input_size() * rows_.dim(), "rows must be len(keys) x dim");
  read_weights(slices, locations, nullptr, [&](std::span<const float> rows, std::size_t first) {
    batch.expand_some(first, rows, rows_.dim(), weights.data());
  });
}

void Shard::locate(const SlotSlices& batch, RowLocations& locations) const {
  check_batch(batch);
  const Turn turn = this->turn();
  known(batch, &locations);
  if (of_all_ != nullptr) {
    const std::shared_lock all(*of_all_);
    find<NoLock>(batch, locations, 0, tables_.size());
  } else {
    find<std::shared_lock<std::shared_mutex>>(batch, locations, 0, tables_.size());
  }
}

template <class Body>
std::uint64_t Shard::write_rows(const SlotSlices& batch, const OccurrenceCounts& occurrences,
                                std::size_t* stepped, RowLocations* locations, ShardScratch* scratch,
                                const Body& body) {
  const Writing writing = begin_writing(batch, locations, RowSource::Use::kCreates);
  InsertContext how{.now = {.clock = table_clock(occurrences.clock)},
                    .asks = !admission_.admits_all(),
                    .counts = occurrences.counts};
  fit(batch, how);
  const std::uint64_t step = step_.fetch_add(1, std::memory_order_relaxed) + 1;
  how.now.step = step;
  std::atomic<std::uint64_t> dropped{0};
  body(
      Change{.step = step, .noise = step_noise(spec_.seed, step), .clock = how.now.clock},
      [&](const auto& use) {
        change(
            batch, how, {.before = locations != nullptr && locations->is_for(number_) ? locations : nullptr},
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
  enforce_max_rows(batch, how.now.clock);
  pushes_.fetch_add(1, std::memory_order_relaxed);
  rows_pushed_.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
  nonfinite_rows_.fetch_add(dropped.load(), std::memory_order_relaxed);
  return step;
}

void Shard::check_push(const SlotSlices& batch, const OccurrenceCounts& occurrences,
                       const std::size_t* stepped, const RowLocations* locations) const {
  SHOAL_CHECK(occurrences.counts.empty() || occurrences.counts.size() == batch.hashes.size(),
              "a push has one count of occurrences a key: " + std::to_string(batch.hashes.size()) + ", got " +
                  std::to_string(occurrences.counts.size()));
  SHOAL_CHECK(stepped == nullptr || pool_.threads() == 1, "several threads step rows in an undefined order");
  SHOAL_CHECK(locations == nullptr || locations->is_of(batch.hashes),
              "these row locations are those of another batch");
}

std::uint64_t Shard::step_rows(const SlotSlices& batch, const Slopes& slopes,
                               const OccurrenceCounts& occurrences, std::size_t* stepped,
                               RowLocations* locations, ShardScratch* scratch) {
  check_push(batch, occurrences, stepped, locations);
  if (const auto* const rule = std::get_if<UserRule>(&spec_.optimizer.rule())) {
    return step_user(*rule, batch, slopes, occurrences, stepped, locations);
  }
  const std::size_t dim = rows_.dim();
  const bool in_place =
      spec_.optimizer.elements() == Elements::kInt64Pairs ||
      (rows_.dtype() == Dtype::kFloat32 && dim >= InPlace::kMinDim && !spec_.optimizer.clip().active());
  return write_rows(batch, occurrences, stepped, locations, scratch, [&](const Change& now, const auto& run) {
    const double part = static_cast<double>(spec_.optimizer.schedule().at(now.clock)) * rate();
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
            rows_.gather(rows, block, ahead);
            mark_moving(block.grads, block.rows, dim, work.moves());
            std::fill_n(work.finite(), block.rows, 1U);
            mark_finite(block.grads, block.rows, dim, work.finite());
            if (spec_.optimizer.clip().active()) {
              spec_.optimizer.clip().apply(block);
            }
            rule.step(block);
            return rows_.scatter_finite(block, work.moves(), work.finite(), rows, ahead);
          };
          run([&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                  PrefetchCursor& ahead) {
            return in_place ? step_in_place(work, rows, first, ahead) : step_block(work, rows, first, ahead);
          });
        },
        spec_.optimizer.rule());
  });
}

std::uint64_t Shard::push(const SlotSlices& batch, std::span<const float> grads,
                          const OccurrenceCounts& occurrences, std::size_t* stepped, RowLocations* locations,
                          ShardScratch* scratch) {
  check_batch(batch);
  SHOAL_CHECK(grads.size() == batch.hashes.size() * rows_.dim(), "grads must be len(keys) x dim");
  return step_rows(
      batch,
      [&](std::size_t first, std::size_t /*count*/, float* /*room*/) {
        return grads.data() + first * rows_.dim();
      },
      occurrences, stepped, locations, scratch);
}

std::uint64_t Shard::push_per_key(const KeyBatch& batch, std::span<const float> grads,
                                  const OccurrenceCounts& occurrences, RowLocations* locations) {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  check_batch(slices);
  SHOAL_CHECK(grads.size() == batch.input_size() * rows_.dim(), "grads must be len(keys) x dim");
  return step_rows(
      slices,
      [&](std::size_t first, std::size_t count, float* room) -> const float* {
        batch.sum_some(first, grads.data(), rows_.dim(), {room, count * rows_.dim()},
                       spec_.optimizer.elements());
        return room;
      },
      occurrences, nullptr, locations, nullptr);
}

std::uint64_t Shard::push_whole(const SlotSlices& batch, std::span<const float> changes,
                                const OccurrenceCounts& occurrences, std::size_t* stepped,
                                ShardScratch* scratch) {
  check_batch(batch);
  check_push(batch, occurrences, stepped, nullptr);
  const std::size_t floats = rows_.floats();
  SHOAL_CHECK(spec_.optimizer.adds_up(), "changes of rows of " + spec_.optimizer.name() +
                                             " do not add up: push gradients to a table with this optimizer");
  SHOAL_CHECK(changes.size() == batch.hashes.size() * floats,
              "changes must be len(keys) x the numbers of a row");
  return write_rows(batch, occurrences, stepped, nullptr, scratch, [&](const Change& now, const auto& run) {
    run([&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
      const Block block = work.block(rows.size(), rows_.dim());
      const float* const added = changes.data() + first * floats;
      fill_noise(batch.hashes.subspan(first, rows.size()), block.dim, now.noise, work.noise);
      rows_.gather(rows, block, ahead);
      mark_moving(added, block.rows, floats, work.moves());
      std::fill_n(work.finite(), block.rows, 1U);
      mark_finite(added, block.rows, floats, work.finite());
      add_changes(block, added, work.finite());
      return rows_.scatter_finite(block, work.moves(), work.finite(), rows, ahead);
    });
  });
}

// Adds changes of whole rows; clears finite[r] where state would be negative.
void Shard::add_changes(const Block& block, const float* changes, std::uint32_t* finite) const noexcept {
  const std::size_t floats = rows_.floats();
  const bool derives = spec_.optimizer.derives_weights();
  for (std::size_t r = 0; r < block.rows; ++r) {
    const float* change = changes + r * floats;
    for (std::size_t k = 0; k < rows_.columns(); ++k) {
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
    if (rows_.has_row_state()) {
      float& state = block.row_state[r];
      state = accumulate(state, static_cast<double>(*change), block.noise[r * block.dim], kStateStream);
      finite[r] &= static_cast<std::uint32_t>(state >= 0.0F);
    }
  }
}

void Shard::assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock) {
  check_batch(batch);
  const std::size_t dim = rows_.dim();
  SHOAL_CHECK(weights.size() == batch.hashes.size() * dim, "rows must be len(keys) x dim");
  const bool floats = spec_.optimizer.elements() == Elements::kFloat32;
  for (std::size_t i = 0; floats && i < weights.size(); ++i) {
    SHOAL_CHECK(is_finite(weights[i]) != 0,
                "weights must be finite: one of them is " + std::to_string(weights[i]));
  }
  RowLocations* locations = nullptr;
  const Writing writing = begin_writing(batch, locations, RowSource::Use::kCreates);
  const std::uint64_t shared = step_noise(spec_.seed, 0);
  const InsertContext how{.now = {.clock = table_clock(clock)}};
  fit(batch, how);
  std::visit(
      [&](const auto& rule) {
        change(
            batch, how, {},
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const Block block = work.block(rows.size(), dim);
              rows_.gather(rows, block, ahead);
              const float* const given = weights.data() + first * dim;
              if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
                rule.write(block, given);
              } else {
                std::memcpy(block.columns[0], given, block.size() * sizeof(float));
              }
              fill_noise(batch.hashes.subspan(first, rows.size()), dim, shared, work.noise);
              std::fill_n(work.moves(), block.rows, 1U);
              rows_.scatter(block, {work.moves(), block.rows}, rows, ahead);
            });
      },
      spec_.optimizer.rule());
  enforce_max_rows(batch, how.now.clock);
}

std::size_t Shard::erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot) {
  check_batch(batch);
  RowLocations* locations = nullptr;
  const Writing writing = begin_writing(batch, locations, RowSource::Use::kErases);
  std::atomic<std::size_t> erased{0};
  split(batch, [&](std::size_t first, std::size_t end) {
    for (std::size_t s = first; s < end; ++s) {
      const auto hashes = batch.hashes.subspan(batch.offsets[s], batch.offsets[s + 1] - batch.offsets[s]);
      if (hashes.empty()) {
        continue;
      }
      const std::unique_lock lock(tables_[s]->lock);
      before_change(*tables_[s], hashes);
      const auto rows =
          std::ranges::count_if(hashes, [&](auto hash) { return tables_[s]->table.erase(hash); });
      erased.fetch_add(static_cast<std::size_t>(rows), std::memory_order_relaxed);
      if (!by_slot.empty()) {
        by_slot[s] += static_cast<std::uint32_t>(rows);
      }
      tables_[s]->table.give_back();
      note(s);
    }
  });
  rows_erased_.fetch_add(erased.load(), std::memory_order_relaxed);
  return erased.load();
}

void Shard::contains(const SlotSlices& batch, std::span<std::uint8_t> there) const {
  check_batch(batch);
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
  const Turn turn = bring(batch, locations, RowSource::Use::kReads);
  walk<std::shared_lock<std::shared_mutex>>(batch, known(batch, locations),
                                            [&] { return Asker{there, Workspace(rows_)}; });
}

void Shard::state(const SlotSlices& batch, std::size_t column, std::span<float> values) const {
  check_batch(batch);
  const bool of_row = column == rows_.columns();
  SHOAL_CHECK(column < rows_.columns() || (of_row && rows_.has_row_state()), "there is no such column");
  const std::size_t width = of_row ? 1 : rows_.dim();
  SHOAL_CHECK(values.size() == batch.hashes.size() * width, "values must be len(keys) x the column's width");
  read(batch, nullptr, rows_.bytes(),
       [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         const Block block = work.block(rows.size(), rows_.dim());
         rows_.gather(rows, block, ahead);
         std::memcpy(values.data() + first * width, of_row ? block.row_state : block.columns[column],
                     rows.size() * width * sizeof(float));
       });
}

void Shard::pull_whole(const SlotSlices& batch, std::span<float> numbers, ShardScratch* scratch) const {
  check_batch(batch);
  const std::size_t dim = rows_.dim();
  SHOAL_CHECK(numbers.size() == batch.hashes.size() * rows_.floats(),
              "rows must be len(keys) x the numbers of a row");
  read(
      batch, nullptr, rows_.bytes(),
      [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
        const Block block = work.block(rows.size(), dim);
        rows_.gather(rows, block, ahead);
        float* to = numbers.data() + first * rows_.floats();
        for (std::size_t r = 0; r < block.rows; ++r) {
          for (std::size_t k = 0; k < rows_.columns(); ++k, to += dim) {
            std::memcpy(to, block.columns[k] + r * dim, dim * sizeof(float));
          }
          if (rows_.has_row_state()) {
            *to++ = block.row_state[r];
          }
        }
      },
      scratch);
  pulls_.fetch_add(1, std::memory_order_relaxed);
  rows_pulled_.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
}

void Shard::metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const {
  check_batch(batch);
  const std::size_t count = rows_.metadata().columns();
  SHOAL_CHECK(k < count, "there is no such row metadata");
  SHOAL_CHECK(values.size() == batch.hashes.size(), "values must be len(keys)");
  const std::size_t at = rows_.offset(rows_.stored() - count + k);
  read(batch, nullptr, rows_.bytes(),
       [&](Workspace&, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         for (std::size_t r = 0; r < rows.size(); ++r) {
           ahead.next();
           ahead.next_row();
           std::memcpy(&values[first + r], rows[r] + at, sizeof(std::uint32_t));
         }
       });
}

}  // namespace shoal
