// Replica: what an endpoint holds as the backup of another one: a Service that executes the records of one stream.
//
// Algorithm. State machine replication. The records of a stream are executed in the order of their sequence, each once; earlier ones are
// acknowledged again, later ones are refused as a gap. The Service is deterministic, so it stays equal to the primary's, arc by arc. Two
// checks find out where it does not: the status of each request, and under BSP the clocks that are applied after a tick. A replica that
// differs has diverged: it executes nothing more, and reports why.
//
// Replies to clients are dropped. acknowledgement() is one reply for all records since the last one.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/reply_queue.h"
#include "server/service.h"
#include "wire/wire.h"

namespace shoal {

class Replica {
 public:
  Replica(std::uint64_t stream, Slots slots, const ServiceLimits& limits)
      : stream_(stream), service_(slots, {}, limits) {}

  std::uint64_t stream() const noexcept { return stream_; }
  Service& service() noexcept { return service_; }
  const Service& service() const noexcept { return service_; }
  std::uint64_t position() const noexcept { return position_; }
  // Why it has diverged; "" if it has not.
  const std::string& fault() const noexcept { return fault_; }
  void set_fault(std::string why) { fault_ = std::move(why); }

  // Executes a REPLICATE of this stream, which decode() has checked.
  void handle(std::string_view peer, const wire::Decoded& message) noexcept;
  bool owes_reply() const noexcept { return !peer_.empty(); }
  // Queues the reply to what handle() has received since the last one. Throws std::bad_alloc.
  void acknowledge(ReplyQueue& out);

 private:
  // False: the record was damaged on its way and has to be sent again.
  bool execute(const wire::Decoded& message);
  bool replay(const wire::Decoded& message);

  const std::uint64_t stream_;
  Service service_;
  std::uint64_t position_ = 0;  // sequence of the last record that was executed
  std::string fault_;
  Peer peer_;         // to whom a reply is due
  bool gap_ = false;  // since the last reply
};

// A reply to a REPLICATE of a stream.
void queue_replicate_reply(ReplyQueue& out, std::string_view peer, std::uint64_t stream, wire::Status status,
                           std::uint64_t sequence, std::string_view text = {});

}  // namespace shoal
