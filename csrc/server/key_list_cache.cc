#include "server/key_list_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace shoal {

namespace {

// The bytes of a list in addition to its hashes: the nodes of the list and of the map, and the allocator's headers.
constexpr std::size_t kOverhead = 160;

constexpr std::uint64_t finish(std::uint64_t x) noexcept {
  x = (x ^ (x >> 33U)) * 0xff51afd7ed558ccdU;
  x = (x ^ (x >> 33U)) * 0xc4ceb9fe1a85ec53U;
  return x ^ (x >> 33U);
}

}  // namespace

Digest Digest::read(std::span<const std::byte> bytes) noexcept {
  Digest digest;
  std::memcpy(&digest.first, bytes.data(), sizeof digest.first);
  std::memcpy(&digest.second, bytes.data() + sizeof digest.first, sizeof digest.second);
  return digest;
}

Digest digest(std::span<const std::uint64_t> hashes, std::uint32_t seed) noexcept {
  constexpr std::uint64_t kFirst = 0x87c37b91114253d5U;
  constexpr std::uint64_t kSecond = 0x4cf5ad432745937fU;
  const auto mix_first = [](std::uint64_t word) { return std::rotl(word * kFirst, 31) * kSecond; };
  const auto mix_second = [](std::uint64_t word) { return std::rotl(word * kSecond, 33) * kFirst; };
  std::uint64_t a = seed;
  std::uint64_t b = seed;
  std::size_t i = 0;
  for (; i + 2 <= hashes.size(); i += 2) {
    a ^= mix_first(hashes[i]);
    a = (std::rotl(a, 27) + b) * 5 + 0x52dce729U;
    b ^= mix_second(hashes[i + 1]);
    b = (std::rotl(b, 31) + a) * 5 + 0x38495ab5U;
  }
  if (i < hashes.size()) {
    a ^= mix_first(hashes[i]);
  }
  a ^= hashes.size_bytes();
  b ^= hashes.size_bytes();
  a += b;
  b += a;
  a = finish(a);
  b = finish(b);
  a += b;
  b += a;
  return {a, b};
}

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
