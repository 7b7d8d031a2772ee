// ReplicatedService: an endpoint with its replication: the Service that answers clients, the logs to its backups, and
// the replicas that it holds for others. No socket, no clock, no thread. docs/replication.md is the protocol.
//
//   request -> Service -> records -> next_message() -> socket of the stream -> ReplicatedService of the backup ->
//   Replica
//           -> reply, held <- commit <- handle_backup() <- socket of the stream <- acknowledgement
//
// What an endpoint has to do is declared by the scheduler: assign() names the arcs that it serves and the streams
// that it sends and receives. A backup refuses the records of a stream that its own assignment does not list.
//
// Invariants
//   I1  A reply, also that of a read, leaves only when all records that were appended before it are committed.
//   I2  A stream's records have the positions 1, 2, 3, ... without a gap; a replica executes each once, in this
//       order.
//   I3  An arc is in at most one of: the Service, one replica. None is lost by an exception.
//
// Time is passed in, in milliseconds of any steady clock.
// Threads: any; one mutex, which no call holds while it waits. Calls for the data loop are made by one thread.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/orders.h"
#include "server/replica.h"
#include "server/replication_log.h"
#include "server/reply_queue.h"
#include "server/service.h"
#include "transport/multipart_message.h"
#include "transport/shared_frame.h"
#include "wire/wire.h"

namespace shoal {

// What the scheduler wants an endpoint to do.
struct Assignment {
  struct Outgoing {
    StreamId stream = 0;
    std::string address{};     // of the backup's data loop
    std::string server_key{};  // of its CURVE key, 40 characters of Z85; empty: no encryption
    std::vector<SlotRange> in_sync{};
    std::vector<SlotRange> arriving{};
  };
  struct Incoming {
    StreamId stream = 0;
    std::vector<SlotRange> in_sync{};
  };

  std::uint32_t epoch = 0;
  std::vector<SlotRange> primary{};  // arcs, ascending
  std::vector<Outgoing> outgoing{};
  std::vector<Incoming> incoming{};
  std::uint64_t copy_rate = 0;  // bytes per second and endpoint; 0: no limit
};

// Where a stream is to be connected.
struct StreamTarget {
  StreamId stream = 0;
  std::string address;
  std::string server_key;
};

// For displays and for the control plane.
struct ReplicationStatus {
  struct Outgoing {
    StreamId stream = 0;
    std::uint64_t sent = 0;  // sequences
    std::uint64_t acknowledged = 0;
    std::size_t bytes = 0;  // of records that are not acknowledged
    double silent = 0;      // seconds since the backup was heard
    std::vector<SlotRange> in_sync{};
    std::optional<Replica::Arriving> arriving{};  // bytes that were appended
    std::vector<SlotRange> arrived{};             // of in_sync: since the last assignment
    bool fenced = false;
    std::string fault{};
  };
  struct Incoming {
    StreamId stream = 0;
    std::uint64_t position = 0;
    std::vector<SlotRange> in_sync{};
    std::optional<Replica::Arriving> arriving{};  // bytes that have arrived
    std::string fault{};
  };

  std::uint64_t position = 0;
  std::size_t held = 0;  // replies
  std::vector<Outgoing> streams{};
  std::vector<Incoming> replicas{};
};

class ReplicatedService {
 public:
  ReplicatedService(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits = {});
  ReplicatedService(const ReplicatedService&) = delete;
  ReplicatedService& operator=(const ReplicatedService&) = delete;

  // --- control: as in Service; orders are appended to the logs of all streams ------------------------------------------

  void set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges);
  void start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before = 0,
                 bool is_named = false);
  void end_job(std::uint32_t job);
  void admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
             std::uint32_t job = kDefaultJob);
  LastTick fence(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job = kDefaultJob);
  std::uint32_t dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last = {},
                        std::uint32_t job = kDefaultJob);
  std::uint32_t hold(std::uint32_t job = kDefaultJob);
  void resume(std::uint32_t job = kDefaultJob);
  void set_memory(std::uint64_t slot_bytes);
  void add_table(std::uint32_t id, const TableSpec& spec);
  void drop_table(std::uint32_t id);
  std::vector<std::uint32_t> tables() const { return service_.tables(); }
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const { return service_.snapshot(id); }
  // As in Service; for tests.
  std::vector<std::vector<std::byte>> save_arc(const SlotRange& range) const {
    return service_.save_arc(range);
  }
  std::shared_ptr<CheckpointSession> next_session(std::optional<std::chrono::milliseconds> most = {}) {
    return service_.next_session(most);
  }
  void close_sessions() { service_.close_sessions(); }
  ServiceMetrics metrics() const { return service_.metrics(); }
  // As in Service. Nothing if the endpoint is executing a request for so long: heartbeats do not wait for a function of all rows.
  std::optional<ServiceMetrics> metrics(std::chrono::milliseconds patience) const;
  std::optional<std::vector<Service::ArcLoad>> arc_loads(std::chrono::milliseconds patience) const;
  std::optional<std::vector<Service::TableLoad>> table_loads(std::chrono::milliseconds patience) const;
  std::optional<std::pair<std::vector<HotKey>, std::uint64_t>> hot_keys(
      std::size_t most, std::chrono::milliseconds patience) const;
  std::optional<std::vector<std::int64_t>> peek(std::uint32_t id, std::span<const std::uint64_t> hashes,
                                                std::chrono::milliseconds patience) const;
  std::size_t slots() const noexcept { return service_.slots(); }

  // Called, with the mutex held, when a control call has queued replies or messages, or has changed the targets; must not wait or call
  // the service.
  void set_waker(std::function<void()> waker);
  void set_clock(Service::NanosecondClock clock) { service_.set_clock(clock); }

  // --- replication: any thread ---------------------------------------------------------------------------------------

  // Makes the endpoint what the assignment says. No effect if its epoch is not newer than the last one's. Throws
  // std::invalid_argument, with nothing changed, if it names arcs of a replica that has diverged. After std::bad_alloc it can be called
  // again: no arc is lost.
  void assign(const Assignment& assignment);
  // The last position that was appended.
  std::uint64_t position() const;
  // Whether every stream has acknowledged everything up to it.
  bool committed(std::uint64_t position) const;
  // Whether the backups of arcs that have left the Service have acknowledged all of their records. Other streams may begin with arcs
  // that the same assignment has brought, and wait until their backups are assigned.
  bool retired() const;
  ReplicationStatus replication() const;
  // Nothing if the endpoint is executing a request for so long.
  std::optional<ReplicationStatus> replication(std::chrono::milliseconds patience) const;
  // Refuses all further records of incoming streams, whose primaries have died. Their replicas stay until the next assignment.
  void close_incoming(std::span<const StreamId> streams);
  // How far the copies of arcs are, by first slot, those that are set aside as well. Without replicas that have diverged.
  std::map<std::size_t, std::uint64_t> stamps() const;
  // Calls act(Service&) with the Service of the replica of a stream. What it does is appended to no log.
  template <class Act>
  auto with_replica(StreamId stream, const Act& act) {
    const std::lock_guard lock(mutex_);
    return act(replica_of(stream).service());
  }
  // As Replica::act_on().
  template <class Act>
  auto act_on_replica(StreamId stream, std::span<const SlotRange> arcs, const Order& order, const Act& act) {
    const std::lock_guard lock(mutex_);
    return replica_of(stream).act_on(arcs, order, act);
  }

  // --- data: called by the data loop's thread --------------------------------------------------------------------------

  // As Service::handle(). Replies that wait for a commit are held; handle_backup(), on_time() and released() queue them.
  void handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
              MultipartMessage* received = nullptr, std::uint64_t received_ns = 0) noexcept;
  // Moves the replies that control calls have queued.
  void released(ReplyQueue& out) noexcept;
  // Queues the acknowledgements of the streams from which handle() has received something. To be called before the loop waits, and at
  // least after every 64 messages.
  void acknowledge(ReplyQueue& out) noexcept;

  // Changes whenever targets() does.
  std::uint64_t targets_version() const noexcept { return targets_version_.load(std::memory_order_acquire); }
  // The streams that shall be connected, in ascending order. Others are closed.
  std::vector<StreamTarget> targets() const;
  // The next message to send to a stream's backup. False: none at present. What was returned counts as sent.
  bool next_message(StreamId stream, StreamMessage& message) noexcept;
  // A message of the stream's backup: an acknowledgement. `frames` as received by a DEALER.
  void handle_backup(StreamId stream, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept;
  // The stream has a new connection, or a message could not be sent: what is not acknowledged is sent again.
  void reconnected(StreamId stream) noexcept;
  // To be called once per turn of the loop, before it handles messages: sends again, keeps streams alive, throttles copies.
  void on_time(Milliseconds now, ReplyQueue& out) noexcept;
  // To be called before the loop waits: while no request does, a copy need not wait for its next time. Takes pieces if all that were
  // taken are on their way. Whether it has; then the loop goes on.
  bool use_idle_time() noexcept;
  // When on_time() is due at the latest; the greatest number: only after another call.
  Milliseconds next_time() const noexcept;

 private:
  // What an assignment has taken and not given to anybody yet. It outlives an exception, and the next assignment goes on with it.
  struct Moving {
    std::vector<std::unique_ptr<Arc>> arcs{};
    std::vector<Handover> handovers{};
  };

  // Executes an order and appends it.
  template <class Act>
  auto control(Order order, const Act& act);
  void append_order(const Order& order, std::optional<StreamId> stream = {});
  void append_request(std::span<const wire::Frame> frames, std::span<const SharedFrame> shared,
                      const Service::Executed& executed);
  void append_released();
  void serve_logged(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                    MultipartMessage* received, std::uint64_t received_ns) noexcept;
  void receive_record(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept;
  Replica* find_replica(StreamId stream) noexcept;
  Replica& replica_of(StreamId stream);
  // replicated_service_assign.cc
  void check(const Assignment& assignment) const;
  // Moves the newest of the arcs which are wanted elsewhere from the replicas to moving_, and drops the replicas that are not listed.
  // If it throws, nothing has changed.
  void take_from_replicas(const Assignment& assignment, std::vector<std::unique_ptr<Replica>>& dropped);
  void update_streams(const Assignment& assignment, std::span<const Handover> handovers);
  void update_stream(ReplicationLog::Stream& stream, const Assignment::Outgoing& wanted,
                     const Assignment& assignment, std::span<const Handover> handovers);
  void append_catch_up(StreamId stream, std::uint32_t epoch, std::span<const SlotRange> joining,
                       const Handover& handover);
  // What the backup has of the stream's copy is dropped; it begins again.
  void abort_copy(ReplicationLog::Stream& stream);
  // Whether a save may begin, which cancels the copies in progress; not if another save has already delayed one of them.
  bool admit_save() noexcept;
  // Begins and continues copies, as far as the rate and the acknowledgements allow. Takes pieces if it is time or `is_idle`; returns
  // their bytes.
  std::size_t copy_arcs(bool is_idle = false) noexcept;
  void wake();

  ReplicationStatus status() const;

  mutable std::mutex mutex_;
  std::function<void()> waker_;
  Service service_;
  const ServiceLimits limits_;
  ReplicationLog log_;
  std::uint32_t assigned_ = 0;  // epoch of the last assignment
  std::vector<std::unique_ptr<Replica>> replicas_;
  Moving moving_;
  std::set<StreamId> fenced_;                   // incoming streams that were closed
  std::map<StreamId, std::uint64_t> released_;  // sequence of the last RELEASE of arcs that left the Service
  std::uint64_t copy_rate_ = 0;                 // bytes per second; 0: no limit
  double copy_allowed_ = 0;                     // bytes that may be appended now
  Milliseconds copied_ = 0;                     // when copy_allowed_ was computed
  Milliseconds take_at_ = 0;                    // when pieces of copies are taken next
  Milliseconds copy_due_ = ReplicationLog::kNever;
  std::atomic<std::uint64_t> targets_version_{0};
  wire::Decoded decoded_;  // the current REPLICATE, or its reply
};

}  // namespace shoal
