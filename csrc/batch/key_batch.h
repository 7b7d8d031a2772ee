// KeyBatch: the keys of one batch, in hash order, each once.
//
// Idea. Dedupe, routing, memory order and lock order are one sort. Later steps walk this batch
// front to back and hash nothing again.
//
//   hashes()   h0 < h1 < ... < h[m-1], m <= n keys as given
//   inverse()  n numbers: hashes()[inverse()[i]] == mix(keys[i])
//   offsets()   slots + 1 numbers: slot s is [offsets()[s], offsets()[s + 1])
//   order()    n numbers: the positions 0..n-1 of the keys as given, sorted by hash, then by position
//   group_offsets()   m + 1 numbers: hash u occurs at order()[group_offsets()[u]], ..., order()[group_offsets()[u + 1] - 1]
//
//   keys 7 3 7 with mix(3) < mix(7): hashes {mix(3), mix(7)}, inverse {1, 0, 1}, order {1, 0, 2}, group_offsets {0, 1, 3}
//
// Invariants (verify() checks them):
//   I1  hashes ascend strictly.
//   I2  inverse has n entries below m, and names every hash at least once.
//   I3  begins runs from 0 to m, never falls; every hash lies in its own slot's slice.
//   I4  order names every position once, group_offsets runs from 0 to n and rises strictly, and the positions of one hash rise:
//       so whatever is added up along order() is added in order of occurrence.
//
// Threads: immutable once built; any number of readers. Building uses the pool; the result is a function of the keys
// and the slots alone.
//
// Cost. A handful of linear passes, whatever the keys. On one core of a server of 2023: 120 to 130 million keys/s from
// a thousand to 320,000 keys, 100 at a million, 45 at ten million (where the last pass, inverse, misses every cache).
// Click logs with hot keys take as long as keys that all differ. 20 bytes for each key given are reserved for the results
// and at most 20 more are worked in.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/hash_order.h"

namespace shoal {

class KeyBatch {
 public:
  static constexpr std::size_t kMaxKeys = 0xffffffffU;

  // `last` is one key more, behind the others: that of a bias, say.
  KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool, KeyBatchScratch& scratch,
           std::optional<std::uint64_t> last = {});
  KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
           KeyBatchScratch&& scratch = {});

  // Of hashes as given instead of mix(keys): what a server has.
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

  // Adds up the rows of each hash: grads is n x dim, out m x dim. In order of occurrence, in float64, rounded once.
  void sum(std::span<const float> grads, std::size_t dim, std::span<float> out, ThreadPool& pool) const;

  // The other way: the row of each unique hash to every key as given. rows is m x dim, out n x dim.
  void expand(std::span<const float> rows, std::size_t dim, std::span<float> out, ThreadPool& pool) const;

  // Both for the hashes from `first` on, as many as there is room for `sums` or as there are `rows`, in this thread: for
  // those who use what is still in the cache.
  void sum_some(std::size_t first, const float* grads, std::size_t dim, std::span<float> sums) const noexcept;
  void expand_some(std::size_t first, std::span<const float> rows, std::size_t dim,
                   float* out) const noexcept;

  // How often each hash occurs: out has m entries.
  void counts(std::span<std::uint32_t> out) const;

  // Whether it was made of exactly these keys: a fifth of the work of making it again.
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
