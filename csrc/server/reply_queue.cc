#include "server/reply_queue.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>

#include "base/memory.h"

namespace shoal {

namespace {

// Sizes are rounded up to a quarter of an octave, from 256 bytes on: at most a fifth of a block is unused.
constexpr std::size_t kLeast = 256;
constexpr std::size_t kClasses = 4 * 48;

std::size_t class_of(std::size_t bytes) noexcept {
  const std::size_t n = std::max(bytes, kLeast);
  const auto octave = static_cast<std::size_t>(std::bit_width(n - 1)) - 1;  // 2^octave < n <= 2^(octave + 1)
  const std::size_t quarter = std::size_t{1} << (octave - 2);
  return (octave - 7) * 4 + (n - 1 - (std::size_t{1} << octave)) / quarter;
}

std::size_t class_bytes(std::size_t number) noexcept {
  const std::size_t octave = number / 4 + 7;
  return (std::size_t{1} << octave) + (number % 4 + 1) * (std::size_t{1} << (octave - 2));
}

}  // namespace

struct Blocks::Chunk {
  Chunk(Shared& owner, std::size_t kind_of_size)
      : home(&owner), kind(kind_of_size), memory(class_bytes(kind_of_size)) {}
  Shared* home;
  std::size_t kind;
  std::size_t bytes = 0;  // asked for
  Region memory;
};

// Lives until Blocks and all chunks that are out have gone: `users` counts them.
struct Blocks::Shared {
  explicit Shared(std::size_t most) noexcept : keep(most) {}

  void leave() noexcept {
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete this;
    }
  }

  const std::size_t keep;
  std::atomic<std::size_t> users{1};
  std::atomic<std::size_t> out{0};
  std::atomic<std::size_t> idle{0};  // written under the mutex
  std::mutex mutex;
  bool closed = false;
  std::array<std::vector<std::unique_ptr<Chunk>>, kClasses> kinds;
};

std::byte* Lease::data() const noexcept {
  return chunk_ == nullptr ? nullptr : static_cast<Blocks::Chunk*>(chunk_)->memory.data();
}

void Lease::give_back(void* detached) noexcept {
  if (detached == nullptr) {
    return;
  }
  std::unique_ptr<Blocks::Chunk> chunk(static_cast<Blocks::Chunk*>(detached));
  Blocks::Shared& home = *chunk->home;
  home.out.fetch_sub(chunk->bytes, std::memory_order_relaxed);
  {
    const std::lock_guard lock(home.mutex);
    const std::size_t idle = home.idle.load(std::memory_order_relaxed);
    auto& kind = home.kinds.at(chunk->kind);
    if (!home.closed && idle + chunk->memory.bytes() <= home.keep && kind.size() < kind.capacity()) {
      home.idle.store(idle + chunk->memory.bytes(), std::memory_order_relaxed);
      kind.push_back(std::move(chunk));  // there is place: nothing is allocated here
    }
  }
  chunk.reset();
  home.leave();
}

Blocks::Blocks(std::size_t keep) : shared_(new Shared(keep)) {}

Blocks::~Blocks() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closed = true;
    for (auto& kind : shared_->kinds) {
      kind.clear();
    }
    shared_->idle.store(0, std::memory_order_relaxed);
  }
  shared_->leave();
}

Lease Blocks::take(std::size_t bytes) {
  if (bytes == 0) {
    return {};
  }
  const std::size_t number = class_of(bytes);
  if (number >= kClasses) {
    throw std::bad_alloc();
  }
  std::unique_ptr<Chunk> chunk;
  {
    const std::lock_guard lock(shared_->mutex);
    auto& kind = shared_->kinds.at(number);
    if (!kind.empty()) {
      chunk = std::move(kind.back());
      kind.pop_back();
      shared_->idle.fetch_sub(chunk->memory.bytes(), std::memory_order_relaxed);
    } else if (kind.capacity() == 0) {
      kind.reserve(256);  // of one size at most so many are kept
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

std::size_t Blocks::out() const noexcept { return shared_->out.load(std::memory_order_relaxed); }
std::size_t Blocks::idle() const noexcept { return shared_->idle.load(std::memory_order_relaxed); }

}  // namespace shoal
