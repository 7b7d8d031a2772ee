// Buffer<T>: a heap array of plain numbers that nobody has set yet.
//
// Idea. A vector writes zeros that are overwritten at once; for arrays of megabytes that is a pass over memory.
//
//   results  Buffer<float> rows(n);   exactly n elements
//   scratch  buffer.claim(n);         room for n, kept from call to call; what it held is lost
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace shoal {

template <class T>
class Buffer {
 public:
  static_assert(std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>);

  Buffer() = default;
  explicit Buffer(std::size_t size) : data_(std::make_unique_for_overwrite<T[]>(size)), size_(size) {}
  Buffer(Buffer&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  T* begin() noexcept { return data(); }
  T* end() noexcept { return data() + size_; }
  const T* begin() const noexcept { return data(); }
  const T* end() const noexcept { return data() + size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }

  std::span<T> claim(std::size_t size) {
    if (size > size_) {
      const std::size_t more = size + size / 4;  // batches vary: do not allocate for every longest one so far
      *this = Buffer();                          // first, so that old and new never exist together
      *this = Buffer(more);
    }
    return {data(), size};
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t size_ = 0;
};

}  // namespace shoal
