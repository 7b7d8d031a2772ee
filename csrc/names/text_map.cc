#include "names/text_map.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"

namespace shoal {

namespace {

constexpr std::size_t kSlots = 64;  // a slot that grows moves its rows: keep them small
constexpr std::size_t kAhead = 16;

void check_texts(std::span<const std::uint64_t> keys, const TextMap::Texts& texts) {
  SHOAL_CHECK(
      texts.ends.size() == keys.size(),
      std::to_string(keys.size()) + " keys need as many texts, got " + std::to_string(texts.ends.size()));
  SHOAL_CHECK(
      std::ranges::is_sorted(texts.ends) && (texts.ends.empty() || texts.ends.back() <= texts.bytes.size()),
      "the ends of texts must not fall, nor exceed the " + std::to_string(texts.bytes.size()) +
          " bytes of all");
}

std::span<const std::uint8_t> text_at(const TextMap::Texts& texts, std::size_t i) noexcept {
  const std::uint64_t begin = i == 0 ? 0 : texts.ends[i - 1];
  return texts.bytes.subspan(begin, texts.ends[i] - begin);
}

}  // namespace

TextMap::TextMap() : layout_(sizeof(std::uint32_t), Slots(kSlots)) {
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    index_.emplace_back(layout_, Slot{slot});
  }
}

std::size_t TextMap::bytes() const noexcept {
  return std::accumulate(index_.begin(), index_.end(), keys_.bytes() + ends_.bytes() + text_.bytes(),
                         [](std::size_t sum, const SlotTable& table) { return sum + table.bytes(); });
}

std::vector<std::uint32_t> TextMap::missing(std::span<const std::uint64_t> keys) {
  SHOAL_CHECK(keys.size() <= kMost, "at most 2^32 - 1 keys at a time, got " + std::to_string(keys.size()));
  // Hashes by slot: those of one slot are searched together.
  std::array<std::size_t, kSlots + 1> ends{};
  for (const std::uint64_t key : keys) {
    ++ends[slot_of(mix(key)) + 1];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<std::uint64_t> hashes(keys.size());
  std::vector<std::uint32_t> position_of(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = mix(keys[i]);
    const std::size_t at = ends[slot_of(hash)]++;
    hashes[at] = hash;
    position_of[at] = static_cast<std::uint32_t>(i);
  }
  std::vector<std::byte*> rows(keys.size());
  std::size_t begin = 0;
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    const std::size_t count = ends[slot] - begin;
    index_[slot].find(std::span(hashes).subspan(begin, count), std::span(rows).subspan(begin, count));
    begin = ends[slot];
  }
  std::vector<std::uint8_t> is_missing(keys.size());
  for (std::size_t at = 0; at < rows.size(); ++at) {
    is_missing[position_of[at]] = rows[at] == nullptr ? 1 : 0;
  }
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (is_missing[i] != 0) {
      positions.push_back(static_cast<std::uint32_t>(i));
    }
  }
  return positions;
}

void TextMap::add(std::span<const std::uint64_t> keys, const Texts& texts, std::size_t most) {
  check_texts(keys, texts);
  keys_.reserve(keys.size());
  ends_.reserve(keys.size());
  text_.reserve(texts.bytes.size());
  most = std::min(most, kMost);
  std::array<std::size_t, kSlots> counts{};
  for (const std::uint64_t key : keys.first(std::min(keys.size(), most - std::min(most, size())))) {
    ++counts[slot_of(mix(key))];
  }
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    index_[slot].make_room(counts[slot]);  // once; later ones are rare
  }
  for (std::size_t i = 0; i < keys.size() && size() < most; ++i) {
    if (i + kAhead < keys.size()) {
      const std::uint64_t ahead = mix(keys[i + kAhead]);
      index_[slot_of(ahead)].prefetch(ahead);
    }
    const std::uint64_t hash = mix(keys[i]);
    SlotTable& table = index_[slot_of(hash)];
    if (table.find_one(hash) != nullptr) {
      continue;
    }
    if (!table.has_room(1)) {
      table.make_room(1);
    }
    const auto number = static_cast<std::uint32_t>(size());
    std::memcpy(table.insert(hash), &number, sizeof number);
    text_.append(text_at(texts, i));
    keys_.append({&keys[i], 1});
    const std::uint64_t end = text_.size();
    ends_.append({&end, 1});
  }
}

std::span<const std::uint8_t> TextMap::text(std::size_t number) const noexcept {
  const std::uint64_t begin = number == 0 ? 0 : ends_.values()[number - 1];
  return text_.values().subspan(begin, ends_.values()[number] - begin);
}

std::optional<std::span<const std::uint8_t>> TextMap::find(std::uint64_t key) const noexcept {
  const std::uint64_t hash = mix(key);
  const std::byte* const row = index_[slot_of(hash)].find_one(hash);
  if (row == nullptr) {
    return std::nullopt;
  }
  std::uint32_t number;
  std::memcpy(&number, row, sizeof number);
  return text(number);
}

TextMap::OwnedTexts TextMap::texts_of(std::span<const std::uint64_t> keys) const {
  OwnedTexts texts;
  texts.ends.reserve(keys.size());
  for (const std::uint64_t key : keys) {
    if (const auto text = find(key)) {
      texts.append(std::as_bytes(*text));
    } else {
      const std::string digits = std::to_string(key);
      texts.append(std::as_bytes(std::span(digits)));
    }
  }
  return texts;
}

std::vector<std::uint32_t> TextMap::differing(std::span<const std::uint64_t> keys, const Texts& texts) const {
  check_texts(keys, texts);
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (const auto text = find(keys[i]); text && !std::ranges::equal(*text, text_at(texts, i))) {
      positions.push_back(static_cast<std::uint32_t>(i));
    }
  }
  return positions;
}

TextMap::Sorted TextMap::sorted() const {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order;  // key and number
  order.reserve(size());
  for (const std::uint64_t key : keys()) {
    order.emplace_back(key, static_cast<std::uint32_t>(order.size()));
  }
  std::ranges::sort(order);
  Sorted pairs;
  pairs.keys.reserve(size());
  pairs.texts.ends.reserve(size());
  pairs.texts.bytes.reserve(text_.size());
  for (const auto& [key, number] : order) {
    pairs.keys.push_back(key);
    pairs.texts.append(std::as_bytes(text(number)));
  }
  return pairs;
}

}  // namespace shoal
