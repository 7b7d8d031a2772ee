// merge: several sorted lists of (hash, gradient) become one; equal hashes are added up.
//
// Idea. PoolWithScratch send what a KeyBatch made: hashes ascending, each once. A server that waits for all of them adds the
// rows of one hash in list order (the workers' ranks), in float64 rounded once, so the sum does not depend on who was
// first. Lists laid end to end and sorted by (hash, place) are exactly that: a KeyBatch of hashes is the merge.
//
//   list 0   2:(1)  5:(1)
//   list 1   5:(10) 9:(10)      ->   2:(1)  5:(11)  9:(10)
//
// Invariants
//   I1  the hashes of the result ascend strictly; every hash of every list is there, and no other.
//   I2  the rows are the sums in list order, divided by the divisor before they are rounded; counts, where every list
//       has them, are added as well.
//
// Large lists are merged piece by piece of the hash space, so that what is worked in stays in the cache: 8 to 10 ns a row. In
// fresh memory it was 60, which is why room and scratch are passed in.
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

// Where a merge goes: with room for all rows of all lists.
struct MergeOutput {
  std::span<std::uint64_t> hashes;
  std::span<float> grads;  // len(hashes) x dim
  std::span<std::uint32_t>
      counts;  // or empty, where the lists have none; the greatest uint32 where a sum does not fit
};

// Working memory, worth keeping. One merge at a time.
class MergeScratch {
 private:
  friend std::size_t merge(std::span<const SortedList> lists, std::size_t dim, ThreadPool& pool,
                           MergeScratch& scratch, const MergeOutput& out, std::size_t divisor);
  KeyBatchScratch keys;
  Buffer<std::uint64_t> hashes;
  Buffer<const float*> rows;
  Buffer<std::uint32_t> counts;
};

// How many hashes there are. The divisor of a mean is how many senders there were, lists or not; 1 leaves the sums as they
// are.
std::size_t merge(std::span<const SortedList> lists, std::size_t dim, ThreadPool& pool, MergeScratch& scratch,
                  const MergeOutput& out, std::size_t divisor = 1);

}  // namespace shoal
