// DeferredReads: reads that wait for a clock, in the order in which they may be answered.
//
// A repeated read replaces the one that waits: its peer may have reconnected.
//
// Invariants
//   I1  bytes() is the sum of what the waiting reads hold and of the replies that they will need.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

#include "endpoint/reply_queue.h"
#include "transport/buffer_pool.h"
#include "wire/wire.h"

namespace shoal {

class DeferredReads {
 public:
  struct Read {
    Peer peer;
    wire::Header header;
    PooledBuffer hashes;
    PooledBuffer parameters;  // of a function
    std::size_t reply_bytes = 0;
    std::uint64_t received_ns = 0;  // as in a Reply

    std::size_t bytes() const noexcept {
      return hashes.size() + parameters.size() + reply_bytes + sizeof(Read);
    }
  };
  using Key = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>;  // clock, rank, sequence
  using Reads = std::map<Key, Read>;

  static Key key(const wire::Header& header) noexcept {
    return {header.clock, header.worker, header.sequence};
  }

  bool has(const wire::Header& header) const { return reads_.contains(key(header)); }

  void defer(Read&& read) {
    const auto where = reads_.find(key(read.header));
    const std::size_t bytes = read.bytes();
    if (where == reads_.end()) {
      reads_.emplace(key(read.header), std::move(read));
    } else {
      bytes_ -= where->second.bytes();
      where->second = std::move(read);
    }
    bytes_ += bytes;
  }

  // Removes and returns the first one; requires !empty().
  Read pop() noexcept { return take(reads_.begin()); }
  Read take(Reads::iterator where) noexcept {
    Read read = std::move(where->second);
    reads_.erase(where);
    bytes_ -= read.bytes();
    return read;
  }
  void clear() noexcept {
    reads_.clear();
    bytes_ = 0;
  }

  bool empty() const noexcept { return reads_.empty(); }
  std::size_t size() const noexcept { return reads_.size(); }
  std::size_t bytes() const noexcept { return bytes_; }
  std::uint32_t next_clock() const noexcept { return std::get<0>(reads_.begin()->first); }
  Reads& reads() noexcept { return reads_; }

 private:
  Reads reads_;
  std::size_t bytes_ = 0;
};

}  // namespace shoal
