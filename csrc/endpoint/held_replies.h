// HeldReplies: replies that wait until what they have seen is committed (replica/replication_log.h).
//
// Invariants
//   I1  Positions ascend.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <new>
#include <utility>

#include "endpoint/reply_queue.h"

namespace shoal {

class HeldReplies {
 public:
  bool empty() const noexcept { return held_.empty(); }
  std::size_t size() const noexcept { return held_.size(); }
  std::size_t bytes() const noexcept { return bytes_; }

  // Holds the replies from number `first` on until everything up to the position is committed.
  void hold(ReplyQueue& out, std::size_t first, std::uint64_t position) {
    auto& replies = out.replies();
    for (std::size_t i = first; i < replies.size(); ++i) {
      held_.push_back({.position = position, .reply = std::move(replies[i])});
      bytes_ += held_.back().bytes();
    }
    replies.erase(replies.begin() + static_cast<std::ptrdiff_t>(first), replies.end());
  }

  // Queues those up to a position. Where there is no memory the others leave next time: a reply is moved only
  // once there is room.
  void release(ReplyQueue& out, std::uint64_t committed) noexcept {
    try {
      while (!held_.empty() && held_.front().position <= committed) {
        const std::size_t bytes = held_.front().bytes();
        out.add(std::move(held_.front().reply));
        held_.pop_front();
        bytes_ -= bytes;
      }
    } catch (const std::bad_alloc&) {
    }
  }

 private:
  struct Held {
    std::uint64_t position = 0;
    Reply reply;

    std::size_t bytes() const noexcept { return sizeof(Held) + reply.payload_bytes(); }
  };

  std::deque<Held> held_;
  std::size_t bytes_ = 0;
};

}  // namespace shoal
