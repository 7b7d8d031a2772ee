// Buffer<T>: an uninitialized array of plain numbers.
//
// Why. A vector writes zeros that are overwritten at once; for large arrays that is a pass over memory.
//
//   results  Buffer<float> rows(n);   exactly n elements
//   scratch  buffer.claim(n);         room for n, kept from call to call; the previous contents are lost
//
//   below kMapped bytes   heap, which reuses recently freed pages
//   from kMapped bytes    a Region: the heap would map fresh pages as well, but small ones
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "base/memory.h"
#include "base/units.h"

namespace shoal {

template <class T>
class Buffer {
 public:
  static_assert(std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>);
  static constexpr std::size_t kMapped = 32 * MiB;  // glibc's greatest threshold

  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size) {
    if (size >= kMapped / sizeof(T)) {
      region_.resize(size * sizeof(T));
      data_ = reinterpret_cast<T*>(region_.data());
    } else {
      heap_ = std::make_unique_for_overwrite<T[]>(size);
      data_ = heap_.get();
    }
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(heap_, other.heap_);
    std::swap(region_, other.region_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  T* begin() noexcept { return data_; }
  T* end() noexcept { return data_ + size_; }
  const T* begin() const noexcept { return data_; }
  const T* end() const noexcept { return data_ + size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }

  std::span<T> claim(std::size_t size) {
    if (size > size_) {
      *this = Buffer();                 // first, so that old and new memory never exist at the same time
      *this = Buffer(size + size / 4);  // batch sizes vary: do not reallocate for each new maximum
    }
    return {data_, size};
  }

 private:
  std::unique_ptr<T[]> heap_;
  Region region_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace shoal
