#include "shard/shard.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/noise.h"

namespace shoal {

namespace {

constexpr std::size_t kMinKeys = 4096;  // below it, waking another thread costs more than it saves
constexpr std::size_t kBlockElements = 1024;

constexpr std::uint64_t kTransformSeed = 0x7765696768ULL;  // keeps its rounding apart from that of pushes

constexpr std::uint32_t kMagnitude = 0x7fffffffU;
constexpr std::uint32_t kExponent = 0x7f800000U;  // all ones: infinity or NaN

SHOAL_INLINE std::uint32_t is_finite(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kExponent) != kExponent);
}

SHOAL_INLINE std::uint32_t is_nonzero(float x) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(x) & kMagnitude) != 0);
}

// moves[r]: some element of row r is not zero.
SHOAL_CLONES void mark_moving(const float* x, std::size_t rows, std::size_t dim,
                              std::uint32_t* moves) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      moves[r] = is_nonzero(x[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    std::uint32_t any = 0;
    for (std::size_t e = 0; e < dim; ++e) {
      any |= is_nonzero(x[r * dim + e]);
    }
    moves[r] = any;
  }
}

// finite[r] stays 1 where all elements of row r are finite.
SHOAL_CLONES void mark_finite(const float* x, std::size_t rows, std::size_t dim,
                              std::uint32_t* finite) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < rows; ++r) {
      finite[r] &= is_finite(x[r]);
    }
    return;
  }
  // Nearly always all are, and one flat loop sees that in a fraction of the time that row by row takes.
  std::uint32_t all = 1;
  for (std::size_t i = 0; i < rows * dim; ++i) {
    all &= is_finite(x[i]);
  }
  if (all != 0) {
    return;
  }
  for (std::size_t r = 0; r < rows; ++r) {
    all = 1;
    for (std::size_t e = 0; e < dim; ++e) {
      all &= is_finite(x[r * dim + e]);
    }
    finite[r] &= all;
  }
}

SHOAL_CLONES void fill_noise(std::span<const std::uint64_t> hashes, std::size_t dim, std::uint64_t shared,
                             std::uint32_t* noise) noexcept {
  if (dim == 1) {
    for (std::size_t r = 0; r < hashes.size(); ++r) {
      noise[r] = row_noise(shared, hashes[r]);
    }
    return;
  }
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    const std::uint32_t row = row_noise(shared, hashes[r]);
    for (std::size_t e = 0; e < dim; ++e) {
      noise[r * dim + e] = element_noise(row, static_cast<std::uint32_t>(e));
    }
  }
}

std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

// Of one part: grads, columns, row state, noise, flags, and places for rows that are not there.
struct Shard::Workspace {
  explicit Workspace(const Rows& rows)
      : most(std::clamp<std::size_t>(kBlockElements / rows.dim(), 1, Probe::kMax)),
        elements(most * rows.dim()),
        floats(new float[elements * (kMaxColumns + 1) + most]),
        noise(new std::uint32_t[elements]),
        flags(new std::uint32_t[2 * most]),
        fresh(new std::byte[most * rows.bytes()]) {}

  // A block of `count` rows; all its arrays are free to be written.
  Block block(std::size_t count, std::size_t dim) noexcept {
    float* const at = floats.get();
    return {.rows = count,
            .dim = dim,
            .grads = at,
            .columns = {at + elements, at + 2 * elements, at + 3 * elements},
            .row_state = at + (kMaxColumns + 1) * elements,
            .noise = noise.get(),
            .step = 0};
  }
  std::uint32_t* moves() noexcept { return flags.get(); }
  std::uint32_t* finite() noexcept { return flags.get() + most; }

  std::size_t most;
  std::size_t elements;
  std::unique_ptr<float[]> floats;
  std::unique_ptr<std::uint32_t[]> noise;
  std::unique_ptr<std::uint32_t[]> flags;
  std::unique_ptr<std::byte[]> fresh;
};

Shard::Shard(const TableSpec& spec, Slots slots, ThreadPool& pool, Locks locks, Budget* budget)
    : spec_(spec),
      slots_(slots),
      pool_(pool),
      rows_(spec.dim, spec.dtype, spec.optimizer, spec.lifecycle.metadata()),
      layout_(rows_.bytes(), slots),
      chunks_(rows_.bytes()),
      admission_(spec.lifecycle.admit(), slots),
      number_(next_number()),
      stamp_(process_stamp()),
      of_all_(locks == Locks::kOne ? std::make_unique<std::shared_mutex>() : nullptr),
      budget_(budget),
      noted_(budget == nullptr ? 0 : slots.count()),
      numbers_(PreImageLog::kNumberBytes, slots) {
  for (const Expiry& rule : spec.lifecycle.expire()) {
    SHOAL_CHECK(rule.kind != Expiry::Kind::kMaxRows || rule.rows >= slots.count(),
                "MaxRows needs at least one row a slot, " + std::to_string(slots.count()) + ", got " +
                    std::to_string(rule.rows) + ": raise it, or make the store with fewer slots");
  }
  tables_.reserve(slots.count());
  for (std::size_t s = 0; s < slots.count(); ++s) {
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
    if (bytes_of(*tables_[s]) > budget->spare(s)) {
      throw MemoryBudgetExceededError(
          "the memory budget has no room for a new table, which takes " +
          std::to_string(bytes_of(*tables_[s])) + " bytes of slot " + std::to_string(s) +
          " while it is empty: all tables take " + std::to_string(budget->used(s)) + " of the " +
          std::to_string(budget->share()) + " bytes that each of " + std::to_string(budget->slots()) +
          " slots has; give the store more memory, close a table, erase rows or sweep");
    }
  }
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    note(s);
  }
}

Shard::~Shard() {
  if (stamp_ == process_stamp()) {  // else the parent may have the turn
    leave_budget();
  }
}

void Shard::leave_budget() {
  const auto budget_lock = lock_budget();
  for (std::size_t s = 0; s < noted_.size(); ++s) {
    budget_->note(s, std::exchange(noted_[s], 0), 0);
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

void Shard::check_batch(const SlotSlices& batch) const {
  check_process();
  SHOAL_CHECK(batch.offsets.size() == slots_.count() + 1 && batch.offsets.front() == 0 &&
                  batch.offsets.back() == batch.hashes.size(),
              "the batch is cut into " + std::to_string(batch.offsets.size() - 1) +
                  " slots, the store into " + std::to_string(slots_.count()) +
                  ": make it with the store's key_batch()");
}

std::shared_lock<std::shared_mutex> Shard::enter() const {
  {
    const std::lock_guard wait(pause_mutex_);
  }
  return std::shared_lock(writers_mutex_);
}

void Shard::pause_writers() {
  check_process();
  const std::lock_guard hold(pause_mutex_);
  writers_mutex_.lock();
}

void Shard::resume_writers() { writers_mutex_.unlock(); }

template <class Work>
void Shard::split(const SlotSlices& batch, const Work& work) const {
  const std::size_t parts =
      parts_for(batch.hashes.size(), kMinKeys, pool_.threads() == 1 ? 1 : 4 * pool_.threads());
  const Partition partition{batch.hashes.size(), parts};
  const auto first_slot = [&](std::size_t part) {  // the first slot that starts in the part or behind it
    return part == parts
               ? slots_.count()
               : static_cast<std::size_t>(
                     std::lower_bound(batch.offsets.begin(), batch.offsets.end() - 1, partition.begin(part)) -
                     batch.offsets.begin());
  };
  pool_.run(parts, [&](std::size_t part) { work(first_slot(part), first_slot(part + 1)); });
}

Shard::Known Shard::known(const SlotSlices& batch, RowLocations* locations) const {
  if (locations != nullptr) {
    SHOAL_CHECK(locations->is_of(batch.hashes), "these row locations are those of another batch");
    locations->reset_for(number_, slots_.count());
  }
  return {locations, locations};
}

template <class Lock, class MakeWorker>
void Shard::walk(const SlotSlices& batch, const Known& known, const MakeWorker& make_worker) const {
  const auto walk_by = [&]<class PipelineLock>() {
    split(batch, [&](std::size_t first, std::size_t end) {
      auto worker = make_worker();
      ProbePipeline<PipelineLock>(tables_, layout_, batch.hashes, batch.offsets, worker.work.most,
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

// --- rows that are not there ------------------------------------------------------------------------------------

void Shard::fill_initial_row(std::uint64_t hash, std::byte* row) const noexcept {
  if (!initial_row_.empty()) {
    std::memcpy(row, initial_row_.data(), initial_row_.size());
    return;
  }
  // One row of up to kMaxDim elements and three columns: small enough for the stack.
  std::array<std::array<float, Rows::kMaxDim>, kMaxColumns> columns;
  std::array<std::uint32_t, Rows::kMaxDim> noise;
  float row_state = 0.0F;
  const Block block{.rows = 1,
                    .dim = rows_.dim(),
                    .grads = nullptr,
                    .columns = {columns[0].data(), columns[1].data(), columns[2].data()},
                    .row_state = &row_state,
                    .noise = noise.data(),
                    .step = 0};
  spec_.init.fill(hash, rows_.dim(), block.columns[0]);
  std::visit([&](const auto& rule) { rule.start(block); }, spec_.optimizer.rule());
  fill_noise({&hash, 1}, rows_.dim(), step_noise(spec_.seed, 0), noise.data());  // step 0: no push has it
  const std::uint32_t take = 1;
  PrefetchCursor none;
  rows_.scatter(block, {&take, 1}, {&row, 1}, none);
  const std::size_t marked = rows_.metadata().columns() * sizeof(std::uint32_t);
  std::memset(row + rows_.bytes() - marked, 0, marked);
}

void Shard::make_room(SlotTable& table, std::size_t missing, const SlotSlices& batch, std::size_t next,
                      InsertContext& context) const {
  const std::size_t rest = batch.offsets[index_of(slots_.of(batch.hashes[next - 1])) + 1] - next;
  if (context.counted != &table && rest > table.size() / 8 && !table.index_has_room(missing + rest)) {
    context.counted = &table;
    context.rows.resize(rest);
    table.find(batch.hashes.subspan(next, rest), context.rows);
    missing += static_cast<std::size_t>(std::count(context.rows.begin(), context.rows.end(), nullptr));
  }
  table.make_room(missing);
}

std::size_t Shard::insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                                  std::span<std::byte*> rows, std::uint32_t now) const {
  std::size_t inserted = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) {
      if (slot.filter != nullptr) {
        slot.filter->forget(hashes[r]);
      }
      rows[r] = slot.table.insert(hashes[r]);
      fill_initial_row(hashes[r], rows[r]);
      rows_.metadata().begin(rows[r], now);
      ++inserted;
    }
  }
  return inserted;
}

std::size_t Shard::admit(SlotState& slot, const SlotSlices& batch, std::span<std::byte*> rows,
                         std::size_t first, InsertContext& context) const {
  const std::uint64_t* const hashes = batch.hashes.data() + first;
  std::size_t missing = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) {
      slot.filter->prefetch(hashes[r]);
      ++missing;
    }
  }
  if (budget_ == nullptr) {
    slot.filter->make_room(missing);
  }
  const std::size_t end = batch.offsets[index_of(slots_.of(hashes[0])) + 1];
  if (context.at != &slot) {  // nothing about one slot depends on another, which a thread may have or not
    context.at = &slot;
    context.asked = 0;
    context.admitted = 0;
  }
  std::size_t admitted = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] != nullptr) {
      continue;
    }
    if (!slot.table.has_room(1)) {
      // Before the key is asked about, for memory may run out. As many as will be admitted if all goes on as so far:
      // ascending hashes must not be poured into a table that grows in small steps.
      slot.table.make_room(1 +
                           (end - first - r) * context.admitted / std::max<std::size_t>(context.asked, 1));
    }
    const std::uint32_t count = context.counts.empty() ? 1 : context.counts[first + r];
    ++context.asked;
    if (slot.filter->ask(hashes[r], count, context.now)) {
      rows[r] = slot.table.insert(hashes[r]);
      fill_initial_row(hashes[r], rows[r]);
      rows_.metadata().begin(rows[r], context.now.clock);
      ++admitted;
      ++context.admitted;
    } else {
      context.refused += count;
    }
  }
  return admitted;
}

std::size_t Shard::create(Probe& run, const SlotSlices& batch, std::size_t first,
                          InsertContext& context) const {
  std::size_t created = 0;
  for (const Probe::Part& part : run.parts()) {
    const std::size_t size = part.end - part.begin;
    const std::span<std::byte*> rows = run.rows().subspan(part.begin, size);
    const auto missing = static_cast<std::size_t>(std::count(rows.begin(), rows.end(), nullptr));
    if (missing == 0) {
      continue;
    }
    SlotState& slot = *tables_[index_of(slots_.of(batch.hashes[first + part.begin]))];
    const auto hashes = batch.hashes.subspan(first + part.begin, size);
    if (context.asks) {
      created += admit(slot, batch, rows, first + part.begin, context);
      continue;
    }
    make_room(*part.table, missing, batch, first + part.end, context);
    created += insert_missing(slot, hashes, rows, context.now.clock);
    slot.fills |= missing > size / kFewMissing;
  }
  if (created != 0 || context.asks) {
    run.resolve();  // the new ones, or room for them, may have moved others
  }
  return created;
}

std::size_t Shard::create_all(SlotState& slot, std::span<const std::uint64_t> hashes,
                              InsertContext& context) const {
  context.rows.resize(hashes.size());
  slot.table.find(hashes, context.rows);
  const auto missing =
      static_cast<std::size_t>(std::count(context.rows.begin(), context.rows.end(), nullptr));
  slot.fills = missing > hashes.size() / kFewMissing;
  slot.table.make_room(missing);
  return insert_missing(slot, hashes, context.rows, context.now.clock);
}

template <class Use>
void Shard::read(const SlotSlices& batch, const Known& known, std::size_t touched, const Use& use) const {
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
          rows[r] = shard.initial_row_.empty() ? work.fresh.get() + r * shard.rows_.bytes()
                                               : shard.initial_row_.data();
          if (shard.initial_row_.empty()) {
            shard.fill_initial_row(batch.hashes[first + r], rows[r]);
          }
        }
      }
      use_rows(work, rows, first, ahead);
    }
  };
  walk<Lock>(batch, known, [&] { return Reader{*this, batch, touched, use, Workspace(rows_)}; });
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

template <class Use>
void Shard::change(const SlotSlices& batch, const InsertContext& how, const Known& known, const Use& use) {
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
        // Keys that wait get a row that is forgotten: so a step has no gaps.
        std::ranges::copy(rows, filled.begin());
        for (std::size_t r = 0; r < rows.size(); ++r) {
          if (rows[r] == nullptr) {
            filled[r] = work.fresh.get() + r * shard.rows_.bytes();
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
  walk<Lock>(batch, known,
             [&] { return RowMutator{*this, batch, use, created, refused, Workspace(rows_), how}; });
  refused_.fetch_add(refused.load(), std::memory_order_relaxed);
  const std::uint64_t before = rows_created_.fetch_add(created.load(), std::memory_order_relaxed);
  if (std::bit_width(before) != std::bit_width(before + created.load())) {
    // Slots that outgrow the heap leave it full of holes. Twice is enough: given back too, what batches are worked on in
    // comes back as fresh pages.
    const std::size_t slot_bytes =
        (before + created.load()) * (sizeof(std::uint64_t) + rows_.bytes()) / slots_.count();
    if (slot_bytes >= Region::kMapped / 2 && slot_bytes < 2 * Region::kMapped) {
      trim_heap();
    }
  }
}

// --- requests ---------------------------------------------------------------------------------------------------

template <class Use>
void Shard::read_weights(const SlotSlices& batch, const Known& known, float* to, const Use& use) const {
  std::visit(
      [&](const auto& rule) {
        constexpr bool kDerives = std::remove_cvref_t<decltype(rule)>::kDerivesWeights;
        read(
            batch, known, kDerives ? rows_.bytes() : rows_.width(0),
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
            });
      },
      spec_.optimizer.rule());
  pulls_.fetch_add(1, std::memory_order_relaxed);
  rows_pulled_.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
}

void Shard::pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations) const {
  check_batch(batch);
  SHOAL_CHECK(weights.size() == batch.hashes.size() * rows_.dim(), "rows must be len(keys) x dim");
  read_weights(batch, known(batch, locations), weights.data(), [](std::span<const float>, std::size_t) {});
}

void Shard::pull_per_key(const KeyBatch& batch, std::span<float> weights, RowLocations* locations) const {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  check_batch(slices);
  SHOAL_CHECK(weights.size() == batch.input_size() * rows_.dim(), "rows must be len(keys) x dim");
  read_weights(slices, known(slices, locations), nullptr,
               [&](std::span<const float> rows, std::size_t first) {
                 batch.expand_some(first, rows, rows_.dim(), weights.data());
               });
}

void Shard::locate(const SlotSlices& batch, RowLocations& locations) const {
  check_batch(batch);
  const Known to = known(batch, &locations);
  struct Finder {
    std::size_t touched = 0;

    void enter(SlotState&, std::span<const std::uint64_t>) {}
    void use(Probe& /*run*/, std::size_t /*first*/, PrefetchCursor& ahead) const noexcept { ahead.drain(); }
  };
  const auto find = [&]<class Lock>() {
    Finder finder;
    ProbePipeline<Lock>(tables_, layout_, batch.hashes, batch.offsets, Probe::kMax, to.before, to.after)
        .walk(0, slots_.count(), finder);
  };
  if (of_all_ != nullptr) {
    const std::shared_lock all(*of_all_);
    find.template operator()<NoLock>();
  } else {
    find.template operator()<std::shared_lock<std::shared_mutex>>();
  }
}

std::uint64_t Shard::step_rows(const SlotSlices& batch, const Slopes& slopes,
                               const OccurrenceCounts& occurrences, std::size_t* stepped,
                               const RowLocations* locations) {
  SHOAL_CHECK(occurrences.counts.empty() || occurrences.counts.size() == batch.hashes.size(),
              "a push has one count of occurrences a key: " + std::to_string(batch.hashes.size()) + ", got " +
                  std::to_string(occurrences.counts.size()));
  SHOAL_CHECK(stepped == nullptr || pool_.threads() == 1, "several threads step rows in no order");
  SHOAL_CHECK(locations == nullptr || locations->is_of(batch.hashes),
              "these row locations are those of another batch");
  const std::size_t dim = rows_.dim();
  wait_for_save(batch.hashes.size());
  const auto writing = enter();
  const auto budget_lock = lock_budget();
  InsertContext how{.now = {.clock = table_clock(occurrences.clock)},
                    .asks = !admission_.admits_all(),
                    .counts = occurrences.counts};
  fit(batch, how);
  const std::uint64_t step = step_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t shared = step_noise(spec_.seed, step);
  how.now.step = step;
  const bool in_place =
      rows_.dtype() == Dtype::kFloat32 && dim >= InPlace::kMinDim && !spec_.optimizer.clip().active();
  std::atomic<std::uint64_t> dropped{0};
  const float part = spec_.optimizer.schedule().at(how.now.clock);
  std::visit(
      [&](const auto& given_rule) {
        const auto rule = slowed(given_rule, part);
        // Both return how many rows were not finite.
        const auto step_in_place = [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                                       PrefetchCursor& ahead) -> std::size_t {
          if constexpr (requires(const InPlace& given) { rule.step(given); }) {
            return rule.step({.rows = rows,
                              .dim = dim,
                              .grads = slopes(first, rows.size(), work.floats.get()),
                              .hashes = batch.hashes.data() + first,
                              .noise = shared,
                              .step = step,
                              .beside = work.floats.get() + work.elements,
                              .ahead = &ahead});
          } else {
            return 0;  // never asked: dim is 2
          }
        };
        const auto step_block = [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first,
                                    PrefetchCursor& ahead) {
          Block block = work.block(rows.size(), dim);
          block.step = step;
          const float* const given = slopes(first, rows.size(), block.grads);
          if (given != block.grads) {
            std::memcpy(block.grads, given, block.size() * sizeof(float));
          }
          fill_noise(batch.hashes.subspan(first, rows.size()), dim, shared, work.noise.get());
          rows_.gather(rows, block, ahead);

          std::uint32_t* const moves = work.moves();
          std::uint32_t* const finite = work.finite();
          mark_moving(block.grads, block.rows, dim, moves);
          std::fill_n(finite, block.rows, 1U);
          mark_finite(block.grads, block.rows, dim, finite);
          if (spec_.optimizer.clip().active()) {
            spec_.optimizer.clip().apply(block);
          }
          rule.step(block);
          for (std::size_t k = 0; k < rows_.columns(); ++k) {
            mark_finite(block.columns[k], block.rows, dim, finite);
          }
          if (rows_.has_row_state()) {
            mark_finite(block.row_state, block.rows, 1, finite);
          }
          std::size_t bad = 0;
          for (std::size_t r = 0; r < block.rows; ++r) {
            bad += moves[r] & (finite[r] ^ 1U);
            moves[r] &= finite[r];
          }
          rows_.scatter(block, {moves, block.rows}, rows, ahead);
          return bad;
        };
        change(
            batch, how, {.before = locations != nullptr && locations->is_for(number_) ? locations : nullptr},
            [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
              const std::size_t bad =
                  in_place ? step_in_place(work, rows, first, ahead) : step_block(work, rows, first, ahead);
              if (stepped != nullptr) {
                *stepped = first + rows.size();
              }
              if (bad != 0) {
                dropped.fetch_add(bad, std::memory_order_relaxed);
              }
            });
      },
      spec_.optimizer.rule());
  enforce_max_rows(batch, how.now.clock);
  pushes_.fetch_add(1, std::memory_order_relaxed);
  rows_pushed_.fetch_add(batch.hashes.size(), std::memory_order_relaxed);
  nonfinite_rows_.fetch_add(dropped.load(), std::memory_order_relaxed);
  return step;
}

std::uint64_t Shard::push(const SlotSlices& batch, std::span<const float> grads,
                          const OccurrenceCounts& occurrences, std::size_t* stepped,
                          const RowLocations* locations) {
  check_batch(batch);
  SHOAL_CHECK(grads.size() == batch.hashes.size() * rows_.dim(), "grads must be len(keys) x dim");
  return step_rows(
      batch,
      [&](std::size_t first, std::size_t /*count*/, float* /*room*/) {
        return grads.data() + first * rows_.dim();
      },
      occurrences, stepped, locations);
}

std::uint64_t Shard::push_per_key(const KeyBatch& batch, std::span<const float> grads,
                                  const OccurrenceCounts& occurrences, const RowLocations* locations) {
  const SlotSlices slices{batch.hashes(), batch.offsets()};
  check_batch(slices);
  SHOAL_CHECK(grads.size() == batch.input_size() * rows_.dim(), "grads must be len(keys) x dim");
  return step_rows(
      slices,
      [&](std::size_t first, std::size_t count, float* room) -> const float* {
        batch.sum_some(first, grads.data(), rows_.dim(), {room, count * rows_.dim()});
        return room;
      },
      occurrences, nullptr, locations);
}

void Shard::assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock) {
  check_batch(batch);
  const std::size_t dim = rows_.dim();
  SHOAL_CHECK(weights.size() == batch.hashes.size() * dim, "rows must be len(keys) x dim");
  for (std::size_t i = 0; i < weights.size(); ++i) {
    SHOAL_CHECK(is_finite(weights[i]) != 0,
                "weights must be finite: one of them is " + std::to_string(weights[i]));
  }
  wait_for_save(batch.hashes.size());
  const auto writing = enter();
  const auto budget_lock = lock_budget();
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
              fill_noise(batch.hashes.subspan(first, rows.size()), dim, shared, work.noise.get());
              std::fill_n(work.moves(), block.rows, 1U);
              rows_.scatter(block, {work.moves(), block.rows}, rows, ahead);
            });
      },
      spec_.optimizer.rule());
  enforce_max_rows(batch, how.now.clock);
}

std::size_t Shard::erase(const SlotSlices& batch) {
  check_batch(batch);
  wait_for_save(batch.hashes.size());
  const auto writing = enter();
  const auto budget_lock = lock_budget();
  std::atomic<std::size_t> erased{0};
  split(batch, [&](std::size_t first, std::size_t end) {
    std::size_t count = 0;
    for (std::size_t s = first; s < end; ++s) {
      if (batch.offsets[s] == batch.offsets[s + 1]) {
        continue;
      }
      const std::unique_lock lock(tables_[s]->lock);
      before_change(*tables_[s],
                    batch.hashes.subspan(batch.offsets[s], batch.offsets[s + 1] - batch.offsets[s]));
      for (std::size_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
        count += tables_[s]->table.erase(batch.hashes[i]) ? 1U : 0U;
      }
      tables_[s]->table.give_back();
      note(s);
    }
    erased.fetch_add(count, std::memory_order_relaxed);
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
  walk<std::shared_lock<std::shared_mutex>>(batch, {}, [&] { return Asker{there, Workspace(rows_)}; });
}

void Shard::state(const SlotSlices& batch, std::size_t column, std::span<float> values) const {
  check_batch(batch);
  const bool of_row = column == rows_.columns();
  SHOAL_CHECK(column < rows_.columns() || (of_row && rows_.has_row_state()), "there is no such column");
  const std::size_t width = of_row ? 1 : rows_.dim();
  SHOAL_CHECK(values.size() == batch.hashes.size() * width, "values must be len(keys) x the column's width");
  read(batch, {}, rows_.bytes(),
       [&](Workspace& work, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         const Block block = work.block(rows.size(), rows_.dim());
         rows_.gather(rows, block, ahead);
         std::memcpy(values.data() + first * width, of_row ? block.row_state : block.columns[column],
                     rows.size() * width * sizeof(float));
       });
}

void Shard::metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const {
  check_batch(batch);
  const std::size_t count = rows_.metadata().columns();
  SHOAL_CHECK(k < count, "there is no such mark");
  SHOAL_CHECK(values.size() == batch.hashes.size(), "values must be len(keys)");
  const std::size_t at = rows_.offset(rows_.stored() - count + k);
  read(batch, {}, rows_.bytes(),
       [&](Workspace&, std::span<std::byte* const> rows, std::size_t first, PrefetchCursor& ahead) {
         for (std::size_t r = 0; r < rows.size(); ++r) {
           ahead.next();
           ahead.next_row();
           std::memcpy(&values[first + r], rows[r] + at, sizeof(std::uint32_t));
         }
       });
}

// --- by slot ----------------------------------------------------------------------------------------------------

void Shard::read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const {
  check_process();
  const std::shared_lock lock(tables_[index_of(slot)]->lock);
  read_entries(tables_[index_of(slot)]->table.entries(), hashes, weights);
}

void Shard::read_entries(std::span<const SlotTable::Entry> entries, std::vector<std::uint64_t>& hashes,
                         std::vector<float>& weights) const {
  hashes.resize(entries.size());
  weights.resize(entries.size() * rows_.dim());
  std::vector<std::byte*> rows(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    hashes[i] = entries[i].hash;
    rows[i] = const_cast<std::byte*>(entries[i].row);  // gathered from, not written
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
  SHOAL_CHECK(first <= end && end <= slots_.count(), "there are no such slots");
  const std::size_t dim = rows_.dim();
  const auto writing = enter();
  const std::uint64_t shared = step_noise(spec_.seed ^ kTransformSeed, step());
  std::vector<std::size_t> moved(end - first);
  std::atomic<std::uint64_t> dropped{0};
  const auto transform_slot = [&](const auto& rule, std::size_t slot, Workspace& work, std::span<float> old) {
    if (saving_.active) {
      const std::size_t rows = [&] {
        const std::shared_lock counting(tables_[slot]->lock);
        return tables_[slot]->table.size();
      }();
      wait_for_save(rows);
    }
    const std::unique_lock lock(tables_[slot]->lock);
    before_change_of_all(*tables_[slot]);
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
      fill_noise({hashes.data(), rows.size()}, dim, shared, work.noise.get());
      rows_.scatter(block, {work.moves(), rows.size()}, rows, none);
    };
    tables_[slot]->table.each_row([&](std::uint64_t hash, std::byte* row) {
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

// --- what there is ----------------------------------------------------------------------------------------------

std::size_t Shard::bytes_at(std::size_t rows) const {
  const Partition partition{rows, slots_.count()};
  Chunks chunks(rows_.bytes());
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    if (share != 0) {
      bytes += SlotTable(layout_, Slot{static_cast<std::uint32_t>(s)}, chunks).bytes_with(share, false);
    }
  }
  return bytes;
}

std::size_t Shard::saved_bytes_at(std::size_t rows) const {
  const Partition partition{rows, slots_.count()};
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    const std::size_t share = partition.begin(s + 1) - partition.begin(s);
    bytes += share == 0 ? 0 : section_offsets(share).back();
  }
  return bytes;
}

std::size_t Shard::size() const {
  check_process();
  std::size_t rows = 0;
  for (const auto& slot : tables_) {
    const std::shared_lock lock(slot->lock);
    rows += slot->table.size();
  }
  return rows;
}

ShardStats Shard::stats() const {
  check_process();
  ShardStats stats;
  for (const auto& slot : tables_) {
    const std::shared_lock lock(slot->lock);
    stats.rows += slot->table.size();
    stats.cells += slot->table.cells();
    stats.bytes += bytes_of(*slot);
    if (slot->filter != nullptr) {
      stats.waiting += slot->filter->waiting();
    }
    const SlotTable::Growth& growth = slot->table.growth();
    stats.growth = {.times = stats.growth.times + growth.times,
                    .memory_ns = stats.growth.memory_ns + growth.memory_ns,
                    .moving_ns = stats.growth.moving_ns + growth.moving_ns,
                    .longest_ns = std::max(stats.growth.longest_ns, growth.longest_ns)};
  }
  stats.pulls = pulls_.load();
  stats.pushes = pushes_.load();
  stats.rows_pulled = rows_pulled_.load();
  stats.rows_pushed = rows_pushed_.load();
  stats.rows_created = rows_created_.load();
  stats.rows_erased = rows_erased_.load();
  stats.nonfinite_rows = nonfinite_rows_.load();
  stats.refused = refused_.load();
  for (std::size_t k = 0; k < stats.expired.size(); ++k) {
    stats.expired[k] = expired_[k].load();
  }
  return stats;
}

std::string Shard::verify() const {
  check_process();
  for (std::size_t s = 0; s < tables_.size(); ++s) {
    const std::shared_lock lock(tables_[s]->lock);
    const int broken = tables_[s]->table.verify();
    if (broken != 0) {
      return "slot " + std::to_string(s) + " breaks invariant I" + std::to_string(broken);
    }
  }
  return {};
}

}  // namespace shoal
