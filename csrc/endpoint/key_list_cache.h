// KeyListCache: key lists that workers will probably use again, found by the digest that replaces them on the
// wire.
//
// Algorithm. A content-addressed LRU cache. A worker pulls the rows of a batch, soon pushes to the same rows,
// and reads the same batch in later passes; from the second time on it sends 16 bytes instead of the list. A
// list is identified by all 128 bits of its digest and by its length, and is shared by all workers. After an
// eviction the worker sends the list again.
//
// Invariants
//   I1  bytes() <= capacity; a list larger than the capacity is not kept.
//   I2  find() returns what was passed to insert() with the same digest.
//
// Threads: one at a time. The result of find() is valid until the next insert() or clear().

#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>

#include "base/buffer.h"
#include "wire/digest.h"

namespace shoal {

class KeyListCache {
 public:
  explicit KeyListCache(std::size_t capacity) : capacity_(capacity) {}

  // nullopt if there is none with this digest and length. The list becomes the most recently used.
  std::optional<std::span<const std::uint64_t>> find(const Digest& digest, std::size_t count) noexcept;
  // Keeps nothing if there is no memory for it.
  void insert(const Digest& digest, std::span<const std::uint64_t> hashes) noexcept;
  void clear() noexcept;

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t size() const noexcept { return index_.size(); }
  // "" if all invariants hold.
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
  using Order = std::list<KeyList>;  // the most recently used first

  static std::size_t bytes_of(const KeyList& kept) noexcept;

  std::size_t capacity_;
  std::size_t bytes_ = 0;
  Order order_;
  std::unordered_map<Digest, Order::iterator, DigestHash> index_;
};

}  // namespace shoal
