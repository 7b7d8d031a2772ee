// Outbox: the replies that a request, or a control call, has set free; and the recycled memory they lie in.
//
// Idea. The values of a pull are written once, straight into the memory that the transport will send, and come back
// when it has: from whatever thread sent the last byte, perhaps after everybody else has gone. Fresh pages for every
// large reply would cost more than filling them.
//
//   Blocks   memory by size class, four classes an octave; a class's blocks are handed out again last in, first out
//   Lease    one piece of it, owned: data() is aligned to a cache line, what it held is lost
//   Reply    peer, header, up to three payload frames
//   Outbox   replies in the order in which they leave
//
// Invariants
//   I1  no memory has two owners: a Lease, or the transport that took it by detach(), or Blocks.
//   I2  out() is the sum of bytes() over all blocks that have not come back.
//   I3  idle memory is at most `keep` bytes; the rest goes back to the system.
//
// Threads: blocks are taken and given back by any thread, at any time, also after ~Blocks: what they share lives until the
// last of them is back. A Lease, a Reply and an Outbox have one owner each.

#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

class Blocks;

class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept {
    std::swap(chunk_, other.chunk_);
    std::swap(size_, other.size_);
    return *this;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { give_back(chunk_); }

  std::byte* data() const noexcept;
  std::size_t size() const noexcept { return size_; }
  std::span<std::byte> bytes() const noexcept { return {data(), size_}; }
  // The same memory as an array of T; a remainder that holds no T is left out.
  template <class T>
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(data()), size_ / sizeof(T)};
  }

  // Hands the memory to whoever calls give_back with the result, once; null where there is none.
  void* detach() noexcept {
    size_ = 0;
    return std::exchange(chunk_, nullptr);
  }
  static void give_back(void* detached) noexcept;

 private:
  friend class Blocks;
  Lease(void* chunk, std::size_t size) noexcept : chunk_(chunk), size_(size) {}

  void* chunk_ = nullptr;  // a Blocks::Chunk
  std::size_t size_ = 0;
};

class Blocks {
 public:
  explicit Blocks(std::size_t keep = std::size_t{64} << 20U);
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  // No bytes: an empty Lease. std::bad_alloc where the system has no more.
  Lease take(std::size_t bytes);

  std::size_t out() const noexcept;   // bytes handed out and not yet back
  std::size_t idle() const noexcept;  // bytes kept for the next

 private:
  friend class Lease;
  struct Shared;
  struct Chunk;
  Shared* shared_;
};

// How a ROUTER names a connection: bytes that mean nothing to us.
using Peer = std::string;

struct Reply {
  static constexpr std::size_t kHeaderBytes = 64;
  static constexpr std::size_t kMostPayload = 3;

  Peer peer;
  std::array<std::byte, kHeaderBytes> header;
  std::array<Lease, kMostPayload> payload;
  std::size_t frames = 0;  // of the payload

  std::size_t payload_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const Lease& block : payload) {
      bytes += block.size();
    }
    return bytes;
  }
};

class Outbox {
 public:
  // The blocks must outlive the outbox.
  explicit Outbox(Blocks& blocks) noexcept : blocks_(blocks) {}

  Lease block(std::size_t bytes) { return blocks_.take(bytes); }
  void add(Reply&& reply) { replies_.push_back(std::move(reply)); }
  std::vector<Reply>& replies() noexcept { return replies_; }

 private:
  Blocks& blocks_;
  std::vector<Reply> replies_;
};

}  // namespace shoal
