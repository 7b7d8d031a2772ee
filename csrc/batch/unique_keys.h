// UniqueKeys: the unique keys among many, in hash order, and which of them each input key is.
//
//   hashes()   h0 < h1 < ... < h[m-1], of m unique keys among the n input keys
//   inverse()  n numbers: hashes()[inverse()[i]] == mix(keys[i])
//   offsets()  slots + 1 numbers: slot s is [offsets()[s], offsets()[s + 1])
//
// The results are those of a KeyBatch of the same keys, without the positions of each key (unique_keys.cc). 4
// bytes an input key, and for each thread about 50 bytes a unique key and half a byte for each of its keys,
// at most 16 MiB, while it is built.
//
// Threads: immutable once built; any number of readers. The pool builds it; its size has no effect.

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
