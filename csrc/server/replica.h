// Replica: what an endpoint holds as the backup of another one: a Service that executes the records of one stream.
//
// Algorithm. State machine replication. The records of a stream are executed in the order of their sequence, each once; earlier ones are
// acknowledged again, later ones are refused as a gap. The Service is deterministic, so it stays equal to the primary's, arc by arc. Two
// checks find out where it does not: the status of each request, and under BSP the clocks that are applied after a tick. A replica that
// differs has diverged: it executes nothing more, and reports why.
//
// Copies of arcs arrive in the stream as well, piece by piece. The records that follow COPY_BEGIN are executed as usual, and kept for
// the arc that is arriving. When all pieces are restored, the arc gets a Service of its own and executes the kept records there, some
// per turn; once none is left it joins the others, and is in sync.
//
// Replies to clients are dropped. acknowledgement() is one reply for all records since the last one.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/orders.h"
#include "server/reply_queue.h"
#include "server/service.h"
#include "wire/wire.h"

namespace shoal {

class Replica {
 public:
  Replica(std::uint64_t stream, Slots slots, const ServiceLimits& limits)
      : stream_(stream), slots_(slots), limits_(limits), service_(slots, {}, limits) {}

  std::uint64_t stream() const noexcept { return stream_; }
  Service& service() noexcept { return service_; }
  const Service& service() const noexcept { return service_; }
  std::uint64_t position() const noexcept { return position_; }
  // Why it has diverged; "" if it has not.
  const std::string& fault() const noexcept { return fault_; }
  void set_fault(std::string why) { fault_ = std::move(why); }

  // Executes a REPLICATE of this stream, which decode() has checked.
  void handle(std::string_view peer, const wire::Decoded& message) noexcept;
  bool owes_reply() const noexcept { return is_due_; }
  // Queues the reply to what handle() has received since the last one. Throws std::bad_alloc.
  void acknowledge(ReplyQueue& out);
  // Whether catch_up() has something to do; it executes some of the kept records.
  bool is_behind() const noexcept { return arriving_ && arriving_->service != nullptr; }
  void catch_up() noexcept;
  // The arc that is arriving, and how much of it is here.
  struct Arriving {
    SlotRange range;
    std::uint64_t bytes = 0;
    std::uint64_t total = 0;
  };
  std::optional<Arriving> arriving() const;
  // Removes those arcs that are set aside for which wanted(range) is true.
  std::vector<std::unique_ptr<Arc>> take_aside(const std::function<bool(const SlotRange&)>& wanted);
  // Sets arcs aside that its primary will have, and makes the others of these slots, empty, before the first job. The primary says at
  // which position they join: what it executed before was without them.
  void expect(std::vector<std::unique_ptr<Arc>> arcs, std::span<const SlotRange> in_sync);
  // Lets the expected arcs join. To be called when the primary has ended.
  void join_expected();

 private:
  struct KeptRecord {
    wire::Header header;
    std::vector<std::vector<std::byte>> frames;
  };
  struct Copy {
    SlotRange range;
    std::vector<std::byte> piece;  // the front of one
    ArcRestorer restorer;
    std::uint64_t bytes = 0;
    std::uint64_t total = 0;  // estimated
    std::deque<KeptRecord> kept;
    std::size_t fresh = 0;             // kept since the last turn
    std::unique_ptr<Service> service;  // has the restored arc; null: pieces are missing
  };

  // False: the record was damaged on its way and has to be sent again.
  bool execute(const wire::Decoded& message);
  bool replay(const wire::Decoded& message);
  void execute_order(const Order& order);
  void join(std::span<const SlotRange> ranges);
  void adopt(std::vector<std::unique_ptr<Arc>> arcs);
  bool has(const SlotRange& range) const;
  void keep(const wire::Decoded& message);
  void begin_copy(std::span<const std::byte> head);
  void add_chunk(std::span<const std::byte> chunk);
  void restore_copy();
  void execute_kept();

  const std::uint64_t stream_;
  const Slots slots_;
  const ServiceLimits limits_;
  std::optional<Copy> arriving_;
  std::uint32_t arrived_ = 0;                // 1 + first slot of the range whose copy was completed last
  std::vector<std::unique_ptr<Arc>> aside_;  // arcs that its primary has released, or does not have yet
  std::vector<SlotRange> expected_;          // what the last assignment listed
  wire::Decoded checked_;                    // a request that no arc executes yet
  Service service_;
  std::uint64_t position_ = 0;  // sequence of the last record that was executed
  std::string fault_;
  Peer peer_;            // who sends
  bool is_due_ = false;  // a reply
  bool gap_ = false;     // since the last reply
};

// A reply to a REPLICATE of a stream.
void queue_replicate_reply(ReplyQueue& out, std::string_view peer, std::uint64_t stream, wire::Status status,
                           std::uint64_t sequence, std::uint32_t aux = 0, std::string_view text = {});

}  // namespace shoal
