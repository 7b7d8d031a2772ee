// BufferPool: reusable memory for messages, in size classes.
//
// Algorithm. A segregated free list with four classes per octave (at most a fifth of a buffer is unused);
// each class is a stack. A large reply is written once, into the memory that the transport sends, and the
// memory is reused: filling fresh pages costs more than filling warm ones.
//
// Invariants
//   I1  A buffer has one owner: a PooledBuffer, the transport that took it by detach(), or the pool.
//   I2  used_bytes() is the sum of the sizes of all buffers that were acquired and not released.
//   I3  Idle memory is at most `max_idle_bytes`; the rest goes back to the operating system.
//
// Threads: buffers are acquired and released by any thread, at any time, also after ~BufferPool: the shared
// state lives until the last buffer is released. A PooledBuffer has one owner.

#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "base/units.h"

namespace shoal {

class BufferPool;

class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(PooledBuffer&& other) noexcept { *this = std::move(other); }
  PooledBuffer& operator=(PooledBuffer&& other) noexcept {
    std::swap(chunk_, other.chunk_);
    std::swap(size_, other.size_);
    return *this;
  }
  PooledBuffer(const PooledBuffer&) = delete;
  PooledBuffer& operator=(const PooledBuffer&) = delete;
  ~PooledBuffer() { release(chunk_); }

  std::byte* data() const noexcept;
  std::size_t size() const noexcept { return size_; }
  std::span<std::byte> bytes() const noexcept { return {data(), size_}; }
  // The same memory as an array of T; a remainder that holds no T is left out.
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data()), size_ / sizeof(T)};
  }

  // Gives up ownership: the result must be passed to release() once; null if there is no memory.
  void* detach() noexcept {
    size_ = 0;
    return std::exchange(chunk_, nullptr);
  }
  static void release(void* detached) noexcept;

 private:
  friend class BufferPool;
  PooledBuffer(void* chunk, std::size_t size) noexcept : chunk_(chunk), size_(size) {}

  void* chunk_ = nullptr;  // a BufferPool::Chunk
  std::size_t size_ = 0;
};

class BufferPool {
 public:
  explicit BufferPool(std::size_t max_idle_bytes = 64 * MiB);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // No bytes: an empty PooledBuffer. std::bad_alloc where the system has no more.
  PooledBuffer acquire(std::size_t bytes);

  std::size_t used_bytes() const noexcept;  // bytes acquired and not released
  std::size_t idle_bytes() const noexcept;  // bytes kept for reuse

 private:
  friend class PooledBuffer;
  struct Shared;
  struct Chunk;
  Shared* shared_;
};

}  // namespace shoal
