// TextMap: short texts by key, such as the names of features. Texts are added and never changed.
//
// Layout. A text has a number, in the order of addition. Three columns by number, which grow in place; an
// index of SlotTables has the number of each key.
//
//   key --mix--> slot's table -> number n      keys[n], and the bytes text[ends[n - 1], ends[n])
//
// Memory. 16 bytes a key, about 16 of the index, and the text.
//
// Threads: not synchronized; the owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "table/layout.h"
#include "table/slot_table.h"

namespace shoal {

class TextMap {
 public:
  // Texts: a number has 32 bits.
  static constexpr std::size_t kMost = std::numeric_limits<std::uint32_t>::max();

  // Texts one after the other: i ends at ends[i], where the next one begins.
  struct Texts {
    std::span<const std::uint8_t> bytes;
    std::span<const std::uint64_t> ends;
  };

  TextMap();

  std::size_t size() const noexcept { return keys_.size(); }
  std::size_t bytes() const noexcept;  // of memory

  // The positions of the keys that have no text, ascending: a key that occurs twice is there twice.
  std::vector<std::uint32_t> missing(std::span<const std::uint64_t> keys);
  // Gives each key its text, in order, until there are `most`; a key that has one keeps it.
  // std::invalid_argument, and nothing is added, if the ends are not as many as the keys, fall, or exceed the
  // bytes. std::bad_alloc: the first ones are added.
  void add(std::span<const std::uint64_t> keys, const Texts& texts, std::size_t most = kMost);

  std::optional<std::span<const std::uint8_t>> find(std::uint64_t key) const noexcept;
  // All keys, in the order of addition. Valid until the next add().
  std::span<const std::uint64_t> keys() const noexcept { return keys_.values(); }

  struct OwnedTexts {
    std::vector<std::byte> bytes;
    std::vector<std::uint64_t> ends;

    Texts view() const noexcept {
      return {{reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, ends};
    }
    void append(std::span<const std::byte> text) {
      bytes.insert(bytes.end(), text.begin(), text.end());
      ends.push_back(bytes.size());
    }
  };
  // The text of each key; the key's digits if it has none.
  OwnedTexts texts_of(std::span<const std::uint64_t> keys) const;
  // The positions of the keys that have a text, which is another one. std::invalid_argument as for add().
  std::vector<std::uint32_t> differing(std::span<const std::uint64_t> keys, const Texts& texts) const;

  // All keys, ascending, and their texts.
  struct Sorted {
    std::vector<std::uint64_t> keys;
    OwnedTexts texts;
  };
  Sorted sorted() const;

 private:
  // A vector that grows in place: pages that were never written take no memory.
  template <class T>
  class Column {
   public:
    std::size_t size() const noexcept { return size_; }
    std::size_t bytes() const noexcept { return size_ * sizeof(T); }
    std::span<const T> values() const noexcept { return {reinterpret_cast<const T*>(region_.data()), size_}; }
    void reserve(std::size_t more) {
      if (const std::size_t needed = (size_ + more) * sizeof(T); needed > region_.bytes()) {
        region_.resize(Region::rounded(needed + needed / 2));
      }
    }
    // There must be room for them.
    void append(std::span<const T> values) noexcept {
      if (!values.empty()) {
        std::memcpy(region_.data() + size_ * sizeof(T), values.data(), values.size_bytes());
        size_ += values.size();
      }
    }

   private:
    Region region_;
    std::size_t size_ = 0;
  };

  std::size_t slot_of(std::uint64_t hash) const noexcept { return index_of(layout_.slots.of(hash)); }
  std::span<const std::uint8_t> text(std::size_t number) const noexcept;

  Layout layout_;
  std::deque<SlotTable> index_;
  Column<std::uint64_t> keys_;
  Column<std::uint64_t> ends_;
  Column<std::uint8_t> text_;
};

}  // namespace shoal
