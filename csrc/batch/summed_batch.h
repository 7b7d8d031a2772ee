// SummedBatch: the unique keys of one batch in hash order, each with the sum of its rows, for a push.
//
// Algorithm. Sort-based aggregation (batch/hash_order.h). A push that already has the gradients needs no maps
// between keys and unique hashes: rows are summed while the sorted keys are read, in 0.7 to 0.9 of the time
// of a KeyBatch and sum(). Keys 7 3 7, rows 1 5 2, mix(3) < mix(7): hashes {mix(3), mix(7)}, sums {5, 3}.
//
// Invariants
//   I1  hashes(), offsets() are those of a KeyBatch of the same keys.
//   I2  counts() equal its counts() if they were requested; otherwise they are empty.
//   I3  sums() equal its sum() bit for bit: in order of occurrence, in float64, rounded once, or modulo 2^64.
//
// Threads: see KeyBatch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/int64_pairs.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/hash_order.h"

namespace shoal {

class SummedBatch {
 public:
  // `rows` is keys x dim. `counting`: whether counts() are computed.
  SummedBatch(std::span<const std::uint64_t> keys, std::span<const float> rows, std::size_t dim, Slots slots,
              ThreadPool& pool, KeyBatchScratch& scratch, bool counting = false,
              Elements elements = Elements::kFloat32);

  std::size_t size() const noexcept { return size_; }  // unique keys
  std::size_t dim() const noexcept { return dim_; }
  Slots slots() const noexcept { return slots_; }

  std::span<const std::uint64_t> hashes() const noexcept { return {hashes_, size_}; }
  std::span<const std::uint64_t> offsets() const noexcept { return {offsets_, slots_.count() + 1}; }
  std::span<const float> sums() const noexcept { return {sums_.data(), size_ * dim_}; }
  // The number of occurrences of each hash.
  std::span<const std::uint32_t> counts() const noexcept {
    return {counts_.data(), counts_.size() == 0 ? 0 : size_};
  }

 private:
  Slots slots_;
  std::size_t dim_;
  std::size_t size_ = 0;
  Buffer<std::uint64_t> memory_;  // of hashes and offsets
  std::uint64_t* hashes_ = nullptr;
  std::uint64_t* offsets_ = nullptr;
  Buffer<float> sums_;
  Buffer<std::uint32_t> counts_;
};

}  // namespace shoal
