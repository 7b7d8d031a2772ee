#include "client/filter.h"

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "wire/significance.h"
#include "wire/values.h"

namespace shoal::client {

namespace {

template <class T>
std::span<const T> as(wire::Frame frame) noexcept {
  return {reinterpret_cast<const T*>(frame.data()), frame.size() / sizeof(T)};
}

template <class T>
std::span<T> as(std::span<std::byte> room) noexcept {
  return {reinterpret_cast<T*>(room.data()), room.size() / sizeof(T)};
}

// Packs values without their zeros, if that takes fewer bytes.
template <class Word>
bool pack_into(wire::Frame values, Payload& payload) {
  const auto from = as<Word>(values);
  const std::size_t kept = count_nonzero(from);
  const std::size_t map = map_bytes(from.size());
  if (map + kept * sizeof(Word) >= values.size()) {
    return false;
  }
  std::span<std::byte> map_room;
  std::span<std::byte> kept_room;
  payload.add(own_frame(map, map_room));
  payload.add(own_frame(kept * sizeof(Word), kept_room));
  pack(from, map_room, as<Word>(kept_room));
  return true;
}

}  // namespace

SharedFrame own_frame(std::size_t bytes, std::span<std::byte>& room) {
  // Of words, so that it is aligned for every type.
  const std::shared_ptr<std::uint64_t[]> owner(new std::uint64_t[(bytes + 7) / 8]);
  room = {reinterpret_cast<std::byte*>(owner.get()), bytes};
  return {.bytes = room, .owner = owner};
}

void KnownLists::add(const Digest& digest) {
  remove(digest);
  lists_.push_back(digest);
  places_.emplace(digest, std::prev(lists_.end()));
  if (lists_.size() > kMost) {
    places_.erase(lists_.front());
    lists_.pop_front();
  }
}

void KnownLists::remove(const Digest& digest) {
  const auto found = places_.find(digest);
  if (found != places_.end()) {
    lists_.erase(found->second);
    places_.erase(found);
  }
}

EncodedPayload Filter::pull(const SharedFrame& hashes, const KnownLists& known) {
  EncodedPayload sent{.dtype = options_.weights, .is_packed = options_.zeros};
  sent.payload.add(hashes);
  name(sent, hashes, known);
  ++counts_.pulls;
  return sent;
}

EncodedPayload Filter::prefetch(const SharedFrame& hashes, const KnownLists& known) {
  EncodedPayload sent;
  sent.payload.add(hashes);
  name(sent, hashes, known);
  return sent;
}

EncodedPayload Filter::push(const SharedFrame& hashes, const SharedFrame& grads, std::size_t dim,
                            std::uint64_t sequence, const KnownLists& known, bool whole) {
  EncodedPayload sent{.dtype = wire::Dtype::kFloat32};
  sent.payload.add(hashes);
  const auto names = as<std::uint64_t>(hashes.bytes);
  SharedFrame values = grads;
  if (options_.threshold > 0 && !whole) {
    std::span<std::byte> room;
    SharedFrame filtered = own_frame(values.bytes.size(), room);
    Significance found;
    filter_significant(as<float>(values.bytes), names, dim, options_.threshold, options_.seed, sequence,
                       as<float>(room), found);
    counts_.rows_dropped += found.dropped;
    counts_.rows_raised += found.raised;
    counts_.gradient_error += found.squared;
    values = std::move(filtered);
  }
  if (options_.gradients != wire::Dtype::kFloat32) {
    std::span<std::byte> room;
    SharedFrame halves = own_frame(values.bytes.size() / 2, room);
    NarrowingErrors loss;
    narrow(as<float>(values.bytes), names, dim,
           options_.gradients == wire::Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16, options_.seed,
           sequence, as<std::uint16_t>(room), loss);
    counts_.gradient_error += loss.squared;
    counts_.largest_error = std::max(counts_.largest_error, loss.largest);
    sent.dtype = options_.gradients;
    values = std::move(halves);
  }
  sent.is_packed = options_.zeros && (sent.dtype == wire::Dtype::kFloat32
                                          ? pack_into<float>(values.bytes, sent.payload)
                                          : pack_into<std::uint16_t>(values.bytes, sent.payload));
  if (!sent.is_packed) {
    sent.payload.add(std::move(values));
  }
  ++counts_.pushes;
  counts_.gradient_bytes_saved += static_cast<std::int64_t>(grads.bytes.size());
  for (std::size_t i = 1; i < sent.payload.count; ++i) {
    counts_.gradient_bytes_saved -= static_cast<std::int64_t>(sent.payload.frames.at(i).bytes.size());
  }
  name(sent, hashes, known);
  return sent;
}

void Filter::name(EncodedPayload& sent, const SharedFrame& hashes, const KnownLists& known) {
  const auto list = as<std::uint64_t>(hashes.bytes);
  if (!options_.key_caching || list.size() < kMinKeys) {
    return;
  }
  sent.digest = digest(list, options_.job);
  sent.keep = !known.contains(*sent.digest);
  if (sent.keep) {
    ++counts_.lists_sent;
    return;
  }
  ++counts_.lists_named;
  counts_.key_bytes_saved += static_cast<std::int64_t>(hashes.bytes.size() - Digest::kBytes);
  std::span<std::byte> room;
  sent.payload.frames[0] = own_frame(Digest::kBytes, room);
  std::memcpy(room.data(), &sent.digest->first, sizeof sent.digest->first);
  std::memcpy(room.data() + sizeof sent.digest->first, &sent.digest->second, sizeof sent.digest->second);
}

void Filter::lost(std::size_t bytes) noexcept {
  ++counts_.lists_lost;
  counts_.key_bytes_saved -= static_cast<std::int64_t>(bytes);
}

void Filter::pulled(std::size_t plain, std::size_t came) noexcept {
  counts_.weight_bytes_saved += static_cast<std::int64_t>(plain) - static_cast<std::int64_t>(came);
}

}  // namespace shoal::client
