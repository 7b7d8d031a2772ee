// KeyListCache: key lists that are expected again, found by a digest that stands for them on the wire.
//
// Idea. A worker pulls the rows of a batch and soon pushes to the same rows, in later passes again: the second time 16
// bytes say which. A list is known by all 128 bits of its digest and by its length, and is the same for all workers. What
// was not asked for longest makes capacity; the worker sends the list again then.
//
// Digest: MurmurHash3 x64 128 (Appleby, public domain) of the hashes as bytes, seeded by the job's number: two lists that
// any two workers make by accident collide with probability 2^-128. It is no signature: who may push may also lie.
//
// Invariants
//   I1  bytes() <= capacity; a list that is larger than the capacity is not kept.
//   I2  what find() gives was given to keep() under the same digest.
//
// Threads: one at a time. What find() gives lives until the next keep() or clear().

#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>

#include "base/buffer.h"

namespace shoal {

struct Digest {
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  static constexpr std::size_t kBytes = 16;
  // As it travels. `bytes` are kBytes, from anybody.
  static Digest read(std::span<const std::byte> bytes) noexcept;

  friend bool operator==(const Digest&, const Digest&) = default;
};

Digest digest(std::span<const std::uint64_t> hashes, std::uint32_t seed) noexcept;

class KeyListCache {
 public:
  explicit KeyListCache(std::size_t capacity) : capacity_(capacity) {}

  // Not what is kept under another length. The list becomes the last to go.
  std::optional<std::span<const std::uint64_t>> find(const Digest& digest, std::size_t count) noexcept;
  // Without memory for it, it is not kept.
  void insert(const Digest& digest, std::span<const std::uint64_t> hashes) noexcept;
  void clear() noexcept;

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t size() const noexcept { return index_.size(); }
  // "" where all invariants hold.
  const char* verify() const noexcept;

 private:
  struct KeyList {
    Digest digest;
    Buffer<std::uint64_t> hashes;
  };
  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept {
      return static_cast<std::size_t>(digest.first ^ digest.second);
    }
  };
  using Order = std::list<KeyList>;  // the last to go first

  static std::size_t bytes_of(const KeyList& kept) noexcept;

  std::size_t capacity_;
  std::size_t bytes_ = 0;
  Order order_;
  std::unordered_map<Digest, Order::iterator, DigestHash> index_;
};

}  // namespace shoal
