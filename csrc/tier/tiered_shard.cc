#include "tier/tiered_shard.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"

namespace shoal {

namespace {

using Use = Tier::Use;

SlotSlices slices(const KeyBatch& batch) { return {batch.hashes(), batch.offsets()}; }

void check_memory(const Slots& slots, std::size_t memory) {
  const std::size_t least = Tier::kMinSlotBytes * slots.count();
  SHOAL_CHECK(memory >= least, "a tiered table needs at least " + std::to_string(least) +
                                   " bytes of memory for " + std::to_string(slots.count()) + " slots, got " +
                                   std::to_string(memory) + ": raise it, or make the store with fewer slots");
}

}  // namespace

bool TieredShard::suits(const TableSpec& spec) noexcept {
  return std::ranges::find(spec.lifecycle.expire(), Expiry::Kind::kMaxRows, &Expiry::kind) ==
         spec.lifecycle.expire().end();
}

TieredShard::TieredShard(const TableSpec& spec, Slots slots, ThreadPool& pool, const std::string& directory,
                         std::size_t memory, ReadQueue::Engine engine)
    : Shard(spec, slots, pool) {
  check_memory(slots, memory);
  SHOAL_CHECK(
      suits(spec),
      "a tiered table has no MaxRows rule, which ranks all rows of a slot at each push: sweep it with "
      "TimeToLive, DecayedScore or MinNorm");
  tier_ = std::make_unique<Tier>(*this, directory, memory, engine);
}

TieredShard::TieredShard(const TableSpec& spec, Slots slots, ThreadPool& pool, std::size_t first,
                         std::size_t end, const std::string& directory, TierMemory& memory)
    : Shard(spec, slots, pool, Locks::kOne, nullptr, first, end),
      tier_(std::make_unique<Tier>(*this, directory, memory)) {}

TieredShard::~TieredShard() = default;

std::size_t TieredShard::place_of(Slot slot) const {
  SHOAL_CHECK(index_of(slot) >= first_slot() && index_of(slot) < end_slot(),
              "there is no slot " + std::to_string(index_of(slot)));
  return index_of(slot) - first_slot();
}

// --- rows of a batch --------------------------------------------------------------------------------------------

void TieredShard::pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations,
                       ShardScratch* scratch) const {
  tier_->with_rows(batch, locations, Use::kReads,
                   [&](RowLocations& known) { Shard::pull(batch, weights, &known, scratch); });
}

void TieredShard::pull_per_key(const KeyBatch& batch, std::span<float> weights,
                               RowLocations* locations) const {
  tier_->with_rows(slices(batch), locations, Use::kReads,
                   [&](RowLocations& known) { Shard::pull_per_key(batch, weights, &known); });
}

void TieredShard::locate(const SlotSlices& batch, RowLocations& locations) const {
  const auto lock = tier_->enter();
  Shard::locate(batch, locations);
}

std::uint64_t TieredShard::push(const SlotSlices& batch, std::span<const float> grads,
                                const OccurrenceCounts& occurrences, std::size_t* stepped,
                                RowLocations* locations, ShardScratch* scratch) {
  return tier_->with_rows(batch, locations, Use::kCreates, [&](RowLocations& known) {
    return Shard::push(batch, grads, occurrences, stepped, &known, scratch);
  });
}

std::uint64_t TieredShard::push_per_key(const KeyBatch& batch, std::span<const float> grads,
                                        const OccurrenceCounts& occurrences, RowLocations* locations) {
  return tier_->with_rows(slices(batch), locations, Use::kCreates, [&](RowLocations& known) {
    return Shard::push_per_key(batch, grads, occurrences, &known);
  });
}

void TieredShard::assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock) {
  tier_->with_rows(batch, nullptr, Use::kCreates,
                   [&](RowLocations&) { Shard::assign(batch, weights, clock); });
}

std::size_t TieredShard::erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot) {
  return tier_->with_rows(batch, nullptr, Use::kChanges, [&](RowLocations&) {
    tier_->before_erase(batch);
    return Shard::erase(batch, by_slot);
  });
}

void TieredShard::contains(const SlotSlices& batch, std::span<std::uint8_t> there) const {
  tier_->with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { Shard::contains(batch, there); });
}

void TieredShard::pull_whole(const SlotSlices& batch, std::span<float> numbers, ShardScratch* scratch) const {
  tier_->with_rows(batch, nullptr, Use::kReads,
                   [&](RowLocations&) { Shard::pull_whole(batch, numbers, scratch); });
}

std::uint64_t TieredShard::push_whole(const SlotSlices& batch, std::span<const float> changes,
                                      const OccurrenceCounts& occurrences, std::size_t* stepped,
                                      ShardScratch* scratch) {
  return tier_->with_rows(batch, nullptr, Use::kCreates, [&](RowLocations&) {
    return Shard::push_whole(batch, changes, occurrences, stepped, scratch);
  });
}

void TieredShard::state(const SlotSlices& batch, std::size_t column, std::span<float> values) const {
  tier_->with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { Shard::state(batch, column, values); });
}

void TieredShard::metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const {
  tier_->with_rows(batch, nullptr, Use::kReads, [&](RowLocations&) { Shard::metadata(batch, k, values); });
}

bool TieredShard::prefetch(const SlotSlices& batch, RowLocations* locations) const {
  tier_->prefetch(batch, locations);
  return true;
}

// --- whole slots ------------------------------------------------------------------------------------------------

void TieredShard::with_slots(std::size_t first, std::size_t end, bool changes,
                             const std::function<bool(std::size_t, std::size_t)>& use) {
  bool goes_on = true;
  for (std::size_t s = first; s < end && goes_on; ++s) {
    const std::size_t place = place_of(Slot{static_cast<std::uint32_t>(s)});
    const auto lock = changes ? tier_->enter_to_change(place) : tier_->enter();
    goes_on = tier_->with_slot(place, changes && tier_->rows_of(place) != 0, [&] { return use(s, s + 1); });
  }
}

std::size_t TieredShard::section(Slot slot, std::vector<std::byte>& bytes) const {
  const auto lock = tier_->enter();
  return tier_->with_slot(place_of(slot), false, [&] { return Shard::section(slot, bytes); });
}

void TieredShard::read_slot(Slot slot, std::vector<std::uint64_t>& hashes,
                            std::vector<float>& weights) const {
  const auto lock = tier_->enter();
  tier_->with_slot(place_of(slot), false, [&] { Shard::read_slot(slot, hashes, weights); });
}

std::size_t TieredShard::restore(std::size_t rows, std::span<const std::byte> section, std::size_t first,
                                 std::size_t end) {
  return tier_->with_section(rows, section, first, end, [&](std::size_t from, std::size_t to) {
    return Shard::restore(rows, section, from, to);
  });
}

void TieredShard::reserve(Slots /*cut*/, std::span<const std::size_t> /*rows*/) {}

void TieredShard::restore_state(Slot slot, ByteReader& in) {
  const auto lock = tier_->enter();
  tier_->with_slot(place_of(slot), true, [&] { Shard::restore_state(slot, in); });
}

std::vector<std::uint64_t> TieredShard::sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                              std::span<const Expiry> rules, bool dry_run) {
  constexpr std::ptrdiff_t kReturns =
      5;  // the words of occurrences, which are those of the table at each call
  std::vector<std::uint64_t> total = [&] {
    const auto lock = tier_->enter();
    return Shard::sweep(first, first, store_clock, rules, dry_run);
  }();
  const std::vector<std::uint64_t> returns(total.begin() + kReturns,
                                           total.begin() + static_cast<std::ptrdiff_t>(kSweepHead));
  for (std::size_t s = first; s < end; ++s) {
    const std::size_t place = place_of(Slot{static_cast<std::uint32_t>(s)});
    const auto lock = dry_run ? tier_->enter() : tier_->enter_to_change(place);
    const auto words = tier_->with_slot(place, !dry_run,
                                        [&] { return Shard::sweep(s, s + 1, store_clock, rules, dry_run); });
    std::transform(words.begin(), words.end(), total.begin(), total.begin(), std::plus<>());
  }
  std::ranges::copy(returns, total.begin() + kReturns);
  return total;
}

void TieredShard::pause_writers() {
  auto lock = tier_->enter();
  Shard::pause_writers();
  lock.release();  // until resume_writers()
}

void TieredShard::resume_writers() {
  Shard::resume_writers();
  tier_->leave();
}

// --- what there is ----------------------------------------------------------------------------------------------

Shard::RowBytes TieredShard::rows_and_bytes() const {
  const std::size_t rows = tier_->rows();
  return {.rows = rows, .bytes = rows * (this->rows().bytes() + 2 * sizeof(std::uint64_t))};
}

std::size_t TieredShard::size() const {
  const auto lock = tier_->enter();
  return tier_->rows();
}

ShardStats TieredShard::stats() const {
  const auto lock = tier_->enter();
  ShardStats stats = Shard::stats();
  stats.rows = tier_->rows();
  stats.bytes += tier_->index_bytes();
  return stats;
}

std::string TieredShard::verify() const {
  const auto lock = tier_->enter();
  const std::string broken = Shard::verify();
  return broken.empty() ? tier_->verify() : broken;
}

std::optional<TierStats> TieredShard::tier_stats() const {
  const auto lock = tier_->enter();
  return tier_->stats();
}

std::size_t TieredShard::ahead_bytes() const {
  const auto lock = tier_->enter();
  return tier_->ahead_bytes();
}

}  // namespace shoal
