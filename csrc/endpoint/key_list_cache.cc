#include "endpoint/key_list_cache.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace shoal {

namespace {

// The bytes of a list in addition to its hashes: the nodes of the list and of the map, and the allocator's
// headers.
constexpr std::size_t kOverhead = 160;

}  // namespace

std::size_t KeyListCache::bytes_of(const KeyList& kept) noexcept {
  return kept.hashes.size() * sizeof(std::uint64_t) + kOverhead;
}

std::optional<std::span<const std::uint64_t>> KeyListCache::find(const Digest& digest,
                                                                 std::size_t count) noexcept {
  const auto entry = index_.find(digest);
  if (entry == index_.end() || entry->second->hashes.size() != count) {
    return std::nullopt;
  }
  order_.splice(order_.begin(), order_, entry->second);
  return std::span(order_.front().hashes.data(), count);
}

void KeyListCache::insert(const Digest& digest, std::span<const std::uint64_t> hashes) noexcept {
  const std::size_t bytes = hashes.size_bytes() + kOverhead;
  if (bytes > capacity_ || find(digest, hashes.size())) {
    return;
  }
  const auto drop = [&](Order::iterator last) {
    bytes_ -= bytes_of(*last);
    index_.erase(last->digest);
    order_.erase(last);
  };
  if (const auto other = index_.find(digest); other != index_.end()) {
    drop(other->second);
  }
  while (bytes_ + bytes > capacity_) {
    drop(std::prev(order_.end()));
  }
  try {
    order_.push_front({digest, Buffer<std::uint64_t>(hashes.size())});
    try {
      index_.emplace(digest, order_.begin());
    } catch (const std::bad_alloc&) {
      order_.pop_front();
      return;
    }
  } catch (const std::bad_alloc&) {
    return;
  }
  std::copy(hashes.begin(), hashes.end(), order_.front().hashes.begin());
  bytes_ += bytes;
}

void KeyListCache::clear() noexcept {
  index_.clear();
  order_.clear();
  bytes_ = 0;
}

const char* KeyListCache::verify() const noexcept {
  std::size_t bytes = 0;
  for (const KeyList& kept : order_) {
    bytes += bytes_of(kept);
    const auto entry = index_.find(kept.digest);
    if (entry == index_.end() || &*entry->second != &kept) {
      return "a list is not found under its digest";
    }
  }
  if (bytes != bytes_ || bytes_ > capacity_ || index_.size() != order_.size()) {
    return "the sum of the bytes is wrong";
  }
  return "";
}

}  // namespace shoal
