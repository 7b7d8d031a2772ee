// ReplyQueue: the replies that a request or a control call has produced, in the order in which they are sent.
//
//   Reply        peer, header, up to three payload frames in pooled memory
//   ReplyQueue   replies, and the pool that their payload comes from
//
// Threads: a Reply and a ReplyQueue have one owner each.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "transport/buffer_pool.h"

namespace shoal {

// How a ROUTER names a connection: opaque bytes.
using Peer = std::string;

struct Reply {
  static constexpr std::size_t kHeaderBytes = 64;
  static constexpr std::size_t kMaxPayloadFrames = 3;

  Peer peer;
  std::array<std::byte, kHeaderBytes> header;
  std::array<PooledBuffer, kMaxPayloadFrames> payload;
  std::size_t frames = 0;  // of the payload
  // Of a reply that states how long the server took (wire/times.h): when its request was received; otherwise
  // 0.
  std::uint64_t received_ns = 0;
  std::uint64_t shard_ns = 0;

  std::size_t payload_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const PooledBuffer& block : payload) {
      bytes += block.size();
    }
    return bytes;
  }
};

class ReplyQueue {
 public:
  // The blocks must outlive the reply_queue.
  explicit ReplyQueue(BufferPool& pool) noexcept : pool_(pool) {}

  PooledBuffer acquire(std::size_t bytes) { return pool_.acquire(bytes); }
  void add(Reply&& reply) { replies_.push_back(std::move(reply)); }
  std::vector<Reply>& replies() noexcept { return replies_; }

 private:
  BufferPool& pool_;
  std::vector<Reply> replies_;
};

}  // namespace shoal
