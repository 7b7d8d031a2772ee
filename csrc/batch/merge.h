// merge: merges sorted lists of (hash, gradient) into one; the gradients of equal hashes are added.
//
//   list 0   2:(1)  5:(1)
//   list 1   5:(10) 9:(10)      ->   2:(1)  5:(11)  9:(10)
//
// Invariants
//   I1  The hashes of the result ascend strictly; they are the union of the lists' hashes.
//   I2  The rows are the sums in list order, in float64, divided by the divisor before rounding; counts are
//       added as well, if all lists have them.
//
// Output and scratch memory are passed in: in fresh memory a row takes 60 ns, and otherwise 8 to 10.
//
// Threads: the pool shares the work; the bits do not depend on it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/threads.h"
#include "batch/key_batch.h"

namespace shoal {

struct SortedList {
  std::span<const std::uint64_t> hashes;  // ascending strictly
  std::span<const float> grads;           // len(hashes) x dim
  std::span<const std::uint32_t> counts;  // len(hashes), or empty: in all lists or in none
};

// The output of a merge: with room for all rows of all lists.
struct MergeOutput {
  std::span<std::uint64_t> hashes;
  std::span<float> grads;  // len(hashes) x dim
  std::span<std::uint32_t>
      counts;  // empty if the lists have none; a sum that does not fit becomes the greatest uint32
};

// Working memory; reuse it. Serves one merge at a time.
class MergeScratch {
 private:
  friend std::size_t merge(std::span<const SortedList> lists, std::size_t dim, ThreadPool& pool,
                           MergeScratch& scratch, const MergeOutput& out, std::size_t divisor,
                           Elements elements);
  KeyBatchScratch keys;
  Buffer<std::uint64_t> hashes;
  Buffer<const float*> rows;
  Buffer<std::uint32_t> counts;
};

// Returns the number of hashes. The divisor of a mean is the number of senders, with or without a list; 1
// leaves the sums unchanged. Integers are added modulo 2^64, and their divisor must be 1.
std::size_t merge(std::span<const SortedList> lists, std::size_t dim, ThreadPool& pool, MergeScratch& scratch,
                  const MergeOutput& out, std::size_t divisor = 1, Elements elements = Elements::kFloat32);

}  // namespace shoal
