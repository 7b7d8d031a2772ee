// ByteWriter, ByteReader: numbers, texts and arrays as bytes and back, for the formats that processes of one
// version exchange.
//
//   number   its bytes in memory, little-endian
//   text     u32 length | bytes
//   array    u64 length | its numbers
//
// A reader checks each length before it reads or allocates: it throws std::invalid_argument, which names what
// is decoded and the field, for bytes that no writer has made.
//
// Threads: one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/crc32c.h"  // which checks that this machine is little-endian

namespace shoal {

template <class T>
concept Number = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class ByteWriter {
 public:
  std::vector<std::byte>& bytes() noexcept { return bytes_; }
  const std::vector<std::byte>& bytes() const noexcept { return bytes_; }
  std::vector<std::byte> take() noexcept { return std::move(bytes_); }

  template <Number T>
  void put(T value) {
    const auto* const from = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
  }
  void put_text(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    put_raw(std::as_bytes(std::span(text)));
  }
  template <Number T>
  void put_array(std::span<const T> values) {
    put(std::uint64_t{values.size()});
    put_raw(std::as_bytes(values));
  }
  // Bytes whose length the reader knows.
  void put_raw(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  // Appends bytes for the caller to fill; valid until the next call.
  std::span<std::byte> extend(std::size_t bytes) {
    bytes_.resize(bytes_.size() + bytes);
    return std::span(bytes_).last(bytes);
  }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  // `of` names what is decoded, in errors; it must outlive the reader.
  ByteReader(std::span<const std::byte> bytes, std::string_view of) noexcept : rest_(bytes), of_(of) {}

  std::size_t left() const noexcept { return rest_.size(); }
  void done() const {
    SHOAL_CHECK(rest_.empty(), std::string(of_) + " is followed by " + std::to_string(rest_.size()) +
                                   " bytes that do not belong to it");
  }
  // Throws with this text unless the condition holds.
  void check(bool condition, const char* field, std::string_view why) const {
    SHOAL_CHECK(condition, std::string(of_) + ": " + field + " " + std::string(why));
  }

  template <Number T>
    requires(!std::is_enum_v<T> && !std::is_same_v<T, bool>)
  T take(const char* field) {
    T value;
    std::memcpy(&value, take_raw(sizeof value, field).data(), sizeof value);
    return value;
  }
  // A number from `least` to `most`.
  template <Number T>
  T take_between(const char* field, T least, T most) {
    const T value = take<T>(field);
    SHOAL_CHECK(value >= least && value <= most, std::string(of_) + ": " + field + " is " +
                                                     std::to_string(value) + ", not from " +
                                                     std::to_string(least) + " to " + std::to_string(most));
    return value;
  }
  bool take_flag(const char* field) { return take_between<std::uint8_t>(field, 0, 1) != 0; }
  template <class E>
    requires std::is_enum_v<E>
  E take_enum(const char* field, E last) {
    using Base = std::underlying_type_t<E>;
    return static_cast<E>(take_between<Base>(field, 0, static_cast<Base>(last)));
  }
  std::string take_text(const char* field, std::size_t most) {
    const auto size = take<std::uint32_t>(field);
    SHOAL_CHECK(size <= most, std::string(of_) + ": " + field + " has " + std::to_string(size) +
                                  " bytes, more than " + std::to_string(most));
    const auto raw = take_raw(size, field);
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  // The length of a list whose elements take at least `each` bytes, so that it may be allocated.
  std::size_t take_count(const char* field, std::size_t each) {
    const auto count = take<std::uint64_t>(field);
    SHOAL_CHECK(count <= rest_.size() / each, std::string(of_) + " ends within " + field);
    return static_cast<std::size_t>(count);
  }
  template <Number T>
  std::vector<T> take_array(const char* field) {
    std::vector<T> values(take_count(field, sizeof(T)));
    const auto raw = take_raw(values.size() * sizeof(T), field);
    if (!raw.empty()) {
      std::memcpy(values.data(), raw.data(), raw.size());
    }
    return values;
  }
  // A view of the next bytes.
  std::span<const std::byte> take_raw(std::size_t bytes, const char* field) {
    SHOAL_CHECK(bytes <= rest_.size(), std::string(of_) + " ends within " + field);
    const auto raw = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return raw;
  }

 private:
  std::span<const std::byte> rest_;
  std::string_view of_;
};

}  // namespace shoal
