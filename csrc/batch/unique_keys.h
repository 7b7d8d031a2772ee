// UniqueKeys: the unique keys among many, in hash order, and which of them each input key is.
//
// Algorithm. Hash-based deduplication: each thread gives the hashes of its part numbers in order of occurrence, by a table of
// open addressing; the hashes of all parts, which are few, are sorted as a KeyBatch, and the numbers replaced by their indices
// there. A KeyBatch sorts all input keys; what it has and this has not are the positions of each key. Small keys, such as the
// columns of a matrix, are looked up in an array by themselves, and hashed once for each thread.
//
//   hashes()   h0 < h1 < ... < h[m-1], of m unique keys among the n input keys
//   inverse()  n numbers: hashes()[inverse()[i]] == mix(keys[i])
//   offsets()  slots + 1 numbers: slot s is [offsets()[s], offsets()[s + 1])
//
// The results are those of a KeyBatch of the same keys. Keys chosen to meet in one place of the table are noticed by the
// length of a search, and sorted.
//
// Threads: immutable once built; any number of readers. Building uses the pool; the result does not depend on their number.
//
// Cost. 4 bytes an input key, and for each thread about 50 bytes a unique key and half a byte for each of its keys, at most
// 16 MiB, while it is built.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/key_batch.h"

namespace shoal {

class UniqueKeys {
 public:
  // `last` is one more key, after the others, such as that of a bias.
  UniqueKeys(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool, KeyBatchScratch& scratch,
             std::optional<std::uint64_t> last = {});

  std::size_t size() const noexcept { return sorted_->size(); }
  std::span<const std::uint64_t> hashes() const noexcept { return sorted_->hashes(); }
  std::span<const std::uint32_t> inverse() const noexcept { return {inverse_.data(), inverse_.size()}; }
  std::span<const std::uint64_t> offsets() const noexcept { return sorted_->offsets(); }

 private:
  std::optional<KeyBatch> sorted_;  // of the parts' unique hashes
  Buffer<std::uint32_t> inverse_;
};

}  // namespace shoal
