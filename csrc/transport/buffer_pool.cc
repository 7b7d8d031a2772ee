#include "transport/buffer_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <new>
#include <vector>

#include "base/memory.h"
#include "base/mutex.h"

namespace shoal {

namespace {

// Sizes are rounded up to a quarter of an octave, from 256 bytes on: at most a fifth of a buffer is unused.
constexpr std::size_t kMinBytes = 256;
constexpr std::size_t kClasses = 4 * 48;

std::size_t class_of(std::size_t bytes) noexcept {
  const std::size_t n = std::max(bytes, kMinBytes);
  const auto octave = static_cast<std::size_t>(std::bit_width(n - 1)) - 1;  // 2^octave < n <= 2^(octave + 1)
  const std::size_t quarter = std::size_t{1} << (octave - 2);
  return (octave - 7) * 4 + (n - 1 - (std::size_t{1} << octave)) / quarter;
}

std::size_t class_bytes(std::size_t number) noexcept {
  const std::size_t octave = number / 4 + 7;
  return (std::size_t{1} << octave) + (number % 4 + 1) * (std::size_t{1} << (octave - 2));
}

}  // namespace

struct BufferPool::Chunk {
  Chunk(Shared& owner, std::size_t number)
      : shared(&owner), size_class(number), memory(class_bytes(number)) {}
  Shared* shared;
  std::size_t size_class;
  std::size_t bytes = 0;  // requested
  Region memory;
};

// Lives until BufferPool and all chunks that are out have gone: `users` counts them.
struct BufferPool::Shared {
  explicit Shared(std::size_t max_idle) noexcept : max_idle_bytes(max_idle) {}

  void release() noexcept {
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete this;
    }
  }

  const std::size_t max_idle_bytes;
  std::atomic<std::size_t> users{1};
  std::atomic<std::size_t> out{0};
  std::atomic<std::size_t> idle{0};  // written under the mutex
  Mutex mutex;
  bool closed GUARDED_BY(mutex) = false;
  std::array<std::vector<std::unique_ptr<Chunk>>, kClasses> classes GUARDED_BY(mutex);
};

std::byte* PooledBuffer::data() const noexcept {
  return chunk_ == nullptr ? nullptr : static_cast<BufferPool::Chunk*>(chunk_)->memory.data();
}

void PooledBuffer::release(void* detached) noexcept {
  if (detached == nullptr) {
    return;
  }
  std::unique_ptr<BufferPool::Chunk> chunk(static_cast<BufferPool::Chunk*>(detached));
  BufferPool::Shared& shared = *chunk->shared;
  shared.out.fetch_sub(chunk->bytes, std::memory_order_relaxed);
  {
    const MutexLock lock(shared.mutex);
    const std::size_t idle = shared.idle.load(std::memory_order_relaxed);
    auto& free_list = shared.classes.at(chunk->size_class);
    if (!shared.closed && idle + chunk->memory.bytes() <= shared.max_idle_bytes &&
        free_list.size() < free_list.capacity()) {
      shared.idle.store(idle + chunk->memory.bytes(), std::memory_order_relaxed);
      free_list.push_back(std::move(chunk));  // there is capacity: nothing is allocated here
    }
  }
  chunk.reset();
  shared.release();
}

BufferPool::BufferPool(std::size_t max_idle_bytes) : shared_(new Shared(max_idle_bytes)) {}

BufferPool::~BufferPool() {
  {
    const MutexLock lock(shared_->mutex);
    shared_->closed = true;
    for (auto& free_list : shared_->classes) {
      free_list.clear();
    }
    shared_->idle.store(0, std::memory_order_relaxed);
  }
  shared_->release();
}

PooledBuffer BufferPool::acquire(std::size_t bytes) {
  if (bytes == 0) {
    return {};
  }
  const std::size_t number = class_of(bytes);
  if (number >= kClasses) {
    throw std::bad_alloc();
  }
  std::unique_ptr<Chunk> chunk;
  {
    const MutexLock lock(shared_->mutex);
    auto& free_list = shared_->classes.at(number);
    if (!free_list.empty()) {
      chunk = std::move(free_list.back());
      free_list.pop_back();
      shared_->idle.fetch_sub(chunk->memory.bytes(), std::memory_order_relaxed);
    } else if (free_list.capacity() == 0) {
      free_list.reserve(256);  // of one size at max_idle so many are kept
    }
  }
  if (chunk == nullptr) {
    chunk = std::make_unique<Chunk>(*shared_, number);
  }
  chunk->bytes = bytes;
  shared_->users.fetch_add(1, std::memory_order_relaxed);
  shared_->out.fetch_add(bytes, std::memory_order_relaxed);
  return {chunk.release(), bytes};
}

std::size_t BufferPool::used_bytes() const noexcept { return shared_->out.load(std::memory_order_relaxed); }
std::size_t BufferPool::idle_bytes() const noexcept { return shared_->idle.load(std::memory_order_relaxed); }

}  // namespace shoal
