// TieredShard: a shard of which only a part of the rows is in memory (tier/tier.h). It processes calls as a Shard does, after the tier
// has brought in their rows.
//
// Threads: any number of callers; calls are processed one at a time, each by all threads of the pool. Locks, in this order: those of the
// tier, then those of the shard.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shard/shard.h"
#include "tier/tier.h"

namespace shoal {

class TieredShard final : public Shard {
 public:
  // std::invalid_argument: less than Tier::kMinSlotBytes for each slot, or the table has a MaxRows rule. Throws TierStorageError.
  TieredShard(const TableSpec& spec, Slots slots, ThreadPool& pool, const std::string& directory,
              std::size_t memory, ReadQueue::Engine engine = ReadQueue::Engine::kBest);
  // The slots [first, end) of a server, which uses them from one thread; `memory` must outlive the shard.
  TieredShard(const TableSpec& spec, Slots slots, ThreadPool& pool, std::size_t first, std::size_t end,
              const std::string& directory, TierMemory& memory);
  ~TieredShard() override;

  // Whether a table can have a tier: not with MaxRows, which ranks all rows of a slot at each push.
  static bool suits(const TableSpec& spec) noexcept;

  void pull(const SlotSlices& batch, std::span<float> weights, RowLocations* locations = nullptr,
            ShardScratch* scratch = nullptr) const override;
  void pull_per_key(const KeyBatch& batch, std::span<float> weights,
                    RowLocations* locations = nullptr) const override;
  void locate(const SlotSlices& batch, RowLocations& locations) const override;
  std::uint64_t push(const SlotSlices& batch, std::span<const float> grads,
                     const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                     RowLocations* locations = nullptr, ShardScratch* scratch = nullptr) override;
  std::uint64_t push_per_key(const KeyBatch& batch, std::span<const float> grads,
                             const OccurrenceCounts& occurrences = {},
                             RowLocations* locations = nullptr) override;
  void assign(const SlotSlices& batch, std::span<const float> weights, std::uint32_t clock = 0) override;
  std::size_t erase(const SlotSlices& batch, std::span<std::uint32_t> by_slot = {}) override;
  void contains(const SlotSlices& batch, std::span<std::uint8_t> there) const override;
  void state(const SlotSlices& batch, std::size_t column, std::span<float> values) const override;
  void pull_whole(const SlotSlices& batch, std::span<float> numbers,
                  ShardScratch* scratch = nullptr) const override;
  std::uint64_t push_whole(const SlotSlices& batch, std::span<const float> changes,
                           const OccurrenceCounts& occurrences = {}, std::size_t* stepped = nullptr,
                           ShardScratch* scratch = nullptr) override;
  void metadata(const SlotSlices& batch, std::size_t k, std::span<std::uint32_t> values) const override;
  bool prefetch(const SlotSlices& batch, RowLocations* locations = nullptr) const override;

  void with_slots(std::size_t first, std::size_t end, bool changes,
                  const std::function<bool(std::size_t, std::size_t)>& use) override;
  std::size_t section(Slot slot, std::vector<std::byte>& bytes) const override;
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const override;
  std::size_t restore(std::size_t rows, std::span<const std::byte> section, std::size_t first = 0,
                      std::size_t end = kAllSlots) override;
  // Does nothing: rows go to disk as they come.
  void reserve(Slots cut, std::span<const std::size_t> rows) override;
  void restore_state(Slot slot, ByteReader& in) override;
  using Shard::restore_state;
  std::vector<std::uint64_t> sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                   std::span<const Expiry> rules, bool dry_run) override;

  void pause_writers() override;
  void resume_writers() override;

  std::size_t size() const override;
  // Rows are those of the table, bytes those of its memory.
  ShardStats stats() const override;
  std::string verify() const override;
  std::optional<TierStats> tier_stats() const override;
  std::size_t ahead_bytes() const;
  const PageFile& file() const noexcept { return tier_->file(); }

 private:
  RowBytes rows_and_bytes() const override;
  bool is_resident() const noexcept override { return false; }
  std::size_t place_of(Slot slot) const;

  std::unique_ptr<Tier> tier_;
};

}  // namespace shoal
