// KeyBatch: the unique keys of one batch, in hash order. One sort (batch/hash_order.h) serves deduplication,
// routing, memory order and lock order. Keys 7 3 7 with mix(3) < mix(7): hashes {mix(3), mix(7)}, inverse {1,
// 0, 1}, order {1, 0, 2}, group_offsets {0, 1, 3}. 20 bytes per input key, and at most 20 more as scratch.
//
// Invariants (verify() checks them):
//   I1  hashes ascend strictly.
//   I2  inverse has n entries below m, each index at least once: hashes()[inverse()[i]] == mix(keys[i]).
//   I3  offsets ascend from 0 to m: slot s is [offsets()[s], offsets()[s + 1]), and every hash is in its
//       slot.
//   I4  order is a permutation of the positions, sorted by hash, then by position; hash u occurs at
//       order()[group_offsets()[u]] and on, so sums along order() are formed in order of occurrence.
//
// Threads: immutable once built; any number of readers. The pool builds it; its size has no effect.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/int64_pairs.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/hash_order.h"

namespace shoal {

class KeyBatch {
 public:
  static constexpr std::size_t kMaxKeys = 0xffffffffU;

  // `last` is one more key, after the others, such as that of a bias.
  KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool, KeyBatchScratch& scratch,
           std::optional<std::uint64_t> last = {});
  KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
           KeyBatchScratch&& scratch = {});

  // From hashes instead of keys, as a server receives them.
  static KeyBatch of_hashes(std::span<const std::uint64_t> hashes, Slots slots, ThreadPool& pool,
                            KeyBatchScratch& scratch);

  std::size_t size() const noexcept { return size_; }              // m
  std::size_t input_size() const noexcept { return input_size_; }  // n
  Slots slots() const noexcept { return slots_; }

  std::span<const std::uint64_t> hashes() const noexcept { return {hashes_, size_}; }
  std::span<const std::uint32_t> inverse() const noexcept { return {inverse_, input_size_}; }
  std::span<const std::uint64_t> offsets() const noexcept { return {offsets_, slots_.count() + 1}; }
  std::span<const std::uint32_t> order() const noexcept { return {order_, input_size_}; }
  std::span<const std::uint32_t> group_offsets() const noexcept { return {group_offsets_, size_ + 1}; }

  // Sums the rows of each hash: grads is n x dim, out is m x dim. Floats in order of occurrence, in float64,
  // rounded once.
  void sum(std::span<const float> grads, std::size_t dim, std::span<float> out, ThreadPool& pool,
           Elements elements = Elements::kFloat32) const;

  // The inverse direction: copies the row of each unique hash to every input key that has it. rows is m x
  // dim, out is n x dim.
  void expand(std::span<const float> rows, std::size_t dim, std::span<float> out, ThreadPool& pool) const;

  // The same for the hashes from `first` on, as many as `sums` or `rows` holds, in the calling thread: for
  // callers that use the rows while they are in the cache.
  void sum_some(std::size_t first, const float* grads, std::size_t dim, std::span<float> sums,
                Elements elements) const noexcept;
  void expand_some(std::size_t first, std::span<const float> rows, std::size_t dim,
                   float* out) const noexcept;

  // The number of occurrences of each hash: out has m entries.
  void counts(std::span<std::uint32_t> out) const;

  // Whether it was built from exactly these keys; takes a fifth of the time of building it.
  bool is_of(std::span<const std::uint64_t> keys, ThreadPool& pool) const;

  bool verify() const;

 private:
  KeyBatch(std::span<const std::uint64_t> words, std::optional<std::uint64_t> last, bool mixed, Slots slots,
           ThreadPool& pool, KeyBatchScratch& scratch);

  Slots slots_;
  std::size_t input_size_ = 0;
  std::size_t size_ = 0;
  Buffer<std::uint64_t> memory_;  // of the five arrays
  std::uint64_t* hashes_ = nullptr;
  std::uint64_t* offsets_ = nullptr;
  std::uint32_t* order_ = nullptr;
  std::uint32_t* inverse_ = nullptr;
  std::uint32_t* group_offsets_ = nullptr;
};

}  // namespace shoal
