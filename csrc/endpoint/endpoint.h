// Endpoint: what a data loop serves: the Service that answers clients, the logs to its backups, and the
// followers that it has for others. No socket, no clock, no thread of its own but that of scans. Without
// backups the logs are empty, and no reply waits. docs/replication.md is the protocol.
//
// Invariants
//   I1  A reply, also that of a read, leaves only when all records appended before it are committed.
//   I2  A stream's records have the positions 1, 2, 3, ... without a gap; a follower executes each once, in
//       this order.
//   I3  An arc is in at most one of: the Service, one follower. None is lost by an exception.
//
// Time is passed in, in milliseconds of any steady clock.
// Threads: any; one mutex, which no call holds while it waits. One thread makes the calls for the data loop.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "endpoint/held_replies.h"
#include "endpoint/reply_queue.h"
#include "endpoint/scans.h"
#include "endpoint/service.h"
#include "replica/follower.h"
#include "replica/orders.h"
#include "replica/replication_log.h"
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
    std::optional<Follower::Arriving> arriving{};  // bytes that were appended
    std::vector<SlotRange> arrived{};              // of in_sync: since the last assignment
    bool fenced = false;
    std::string fault{};
  };
  struct Incoming {
    StreamId stream = 0;
    std::uint64_t position = 0;
    std::vector<SlotRange> in_sync{};
    std::optional<Follower::Arriving> arriving{};  // bytes that have arrived
    std::string fault{};
  };

  std::uint64_t position = 0;
  std::size_t held = 0;  // replies
  std::vector<Outgoing> streams{};
  std::vector<Incoming> replicas{};
};

class Endpoint {
 public:
  Endpoint(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits = {});
  ~Endpoint() { close_sessions(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // --- control --------------------------------------------------------------------------------------------

  // Executes an order of the scheduler and appends it to the logs of all streams.
  ArcResult apply(const Order& order);
  void set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges);
  std::vector<std::uint32_t> tables() const;
  // As in Service; for tests.
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const;
  std::vector<std::vector<std::byte>> save_arc(const SlotRange& range) const;
  // Waits for the next session that begins, for at most `patience`; null if there is none, or once
  // close_sessions() was called. A session must not outlive the endpoint, which owns the shards' memory.
  std::shared_ptr<CheckpointSession> next_session(std::optional<std::chrono::milliseconds> patience = {});
  // Cancels all sessions, and refuses new ones.
  void close_sessions();
  std::size_t slots() const noexcept { return slots_.count(); }
  // Called, with the mutex held, when a control call has queued replies or messages, or has changed the
  // targets; must not wait or call the endpoint.
  void set_waker(std::function<void()> waker);
  void set_clock(NanosecondClock clock);

  // --- figures --------------------------------------------------------------------------------------------

  // What ask(service) returns. Nothing if the endpoint is executing a request for so long: heartbeats do not
  // wait for a function of all rows.
  template <class Ask>
  auto within(std::chrono::milliseconds patience, const Ask& ask) const {
    return answer_to(patience, [&] {
      mutex_.assert_held();
      return ask(service_);
    });
  }
  ServiceMetrics metrics() const;
  ReplicationStatus replication() const;
  // As within().
  std::optional<ReplicationStatus> replication(std::chrono::milliseconds patience) const;

  // --- replication: any thread ----------------------------------------------------------------------------

  // Makes the endpoint what the assignment says. No effect if its epoch is not newer than the last one's.
  // Throws std::invalid_argument, with nothing changed, if it names arcs of a follower that has diverged.
  // After std::bad_alloc it can be called again: no arc is lost.
  void assign(const Assignment& assignment);
  // The last position that was appended.
  std::uint64_t position() const;
  // Whether every stream has acknowledged everything up to it.
  bool committed(std::uint64_t position) const;
  // Whether the backups of arcs that have left the Service have acknowledged all of their records. Other
  // streams may begin with arcs that the same assignment has brought, and wait until their backups are
  // assigned.
  bool retired() const;
  // Refuses all further records of incoming streams, whose primaries have died. Their followers stay until
  // the next assignment.
  void close_incoming(std::span<const StreamId> streams);
  // How far the copies of arcs are, by first slot, those that are set aside as well. Without followers that
  // have diverged.
  std::map<std::size_t, std::uint64_t> stamps() const;
  // Calls use(arcs) with the arcs of the follower of a stream. std::invalid_argument: there is none.
  template <class Use>
  auto with_follower(StreamId stream, const Use& use) const {
    const Turn turn(*this);
    return use(follower_of(stream).arcs());
  }
  // As Follower::act_on(): an order for the follower of a stream whose primary died before it logged it.
  ArcResult apply_to_follower(StreamId stream, std::span<const SlotRange> arcs, const Order& order);

  // --- data: called by the data loop's thread -------------------------------------------------------------

  // As Service::handle(). Replies that wait for a commit are held; handle_backup(), on_time() and released()
  // queue them.
  void handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
              MultipartMessage* received = nullptr, std::uint64_t received_ns = 0) noexcept;
  // Moves the replies that control calls have queued.
  void released(ReplyQueue& out) noexcept;
  // Queues the acknowledgements of the streams from which handle() has received something. To be called
  // before the loop waits, and at least after every 64 messages.
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
  // To be called once per turn of the loop, before it handles messages: sends again, keeps streams alive,
  // throttles copies.
  void on_time(Milliseconds now, ReplyQueue& out) noexcept;
  // To be called before the loop waits: while no request does, a copy need not wait for its next time. Takes
  // pieces if all that were taken are on their way. Whether it has; then the loop goes on.
  bool use_idle_time() noexcept;
  // When on_time() is due at the latest; the greatest number: only after another call.
  Milliseconds next_time() const noexcept;

 private:
  // What an assignment has taken and not given to anybody yet. It outlives an exception, and the next
  // assignment goes on with it.
  struct Moving {
    std::vector<std::unique_ptr<Arc>> arcs{};
    std::vector<Handover> handovers{};
  };

  void add_table(const AddTable& order);
  // Appends an order that was executed, and what it has released.
  void log(const Order& order) REQUIRES(mutex_);
  void append_order(const Order& order, std::optional<StreamId> stream = {}) REQUIRES(mutex_);
  void append_request(std::span<const wire::Frame> frames, std::span<const SharedFrame> shared,
                      const ChangedArcs& changed, wire::Status status,
                      std::span<const std::uint64_t> key_list) REQUIRES(mutex_);
  void append_released() REQUIRES(mutex_);
  void serve_logged(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                    MultipartMessage* received, std::uint64_t received_ns) noexcept REQUIRES(mutex_);
  void receive_record(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept
      REQUIRES(mutex_);
  // Whether replies may leave; else holds those from number `first` on, or drops them if there is no memory.
  void gate(ReplyQueue& out, std::size_t first) noexcept REQUIRES(mutex_);
  void release_held(ReplyQueue& out) noexcept REQUIRES(mutex_);
  Follower* find_follower(StreamId stream) noexcept REQUIRES(mutex_);
  const Follower& follower_of(StreamId stream) const REQUIRES(mutex_);
  // assign.cc
  void check(const Assignment& assignment) const REQUIRES(mutex_);
  // Moves the newest of the arcs which are wanted elsewhere from the followers to moving_, and drops the
  // followers that are not listed. If it throws, nothing has changed.
  void take_from_followers(const Assignment& assignment, std::vector<std::unique_ptr<Follower>>& dropped)
      REQUIRES(mutex_);
  void update_streams(const Assignment& assignment, std::span<const Handover> handovers) REQUIRES(mutex_);
  void update_stream(ReplicationLog::Stream& stream, const Assignment::Outgoing& wanted,
                     const Assignment& assignment, std::span<const Handover> handovers) REQUIRES(mutex_);
  void append_catch_up(StreamId stream, std::uint32_t epoch, std::span<const SlotRange> joining,
                       const Handover& handover) REQUIRES(mutex_);
  // What the backup has of the stream's copy is dropped; it begins again.
  void abort_copy(ReplicationLog::Stream& stream) REQUIRES(mutex_);
  // Whether a save may begin, which cancels the copies in progress; not if another save has already delayed
  // one of them.
  bool admit_save() noexcept REQUIRES(mutex_);
  // Begins and continues copies, as far as the rate and the acknowledgements allow. Takes pieces if it is
  // time or `is_idle`; returns their bytes.
  std::size_t copy_arcs(bool is_idle = false) noexcept REQUIRES(mutex_);
  ReplicationStatus status() const REQUIRES(mutex_);
  void wake() REQUIRES(mutex_);
  // A call of within() that found the mutex taken: who has it answers when it lets it go.
  struct Question {
    std::function<void()> ask;
    bool is_answered = false;
    CondVar answered{};
  };
  // Holds the mutex. At its end, questions are answered, and who waits for a session is told of one that has
  // begun.
  class SCOPED_CAPABILITY Turn {
   public:
    explicit Turn(const Endpoint& endpoint) ACQUIRE(endpoint.mutex_) : endpoint_(endpoint) {
      endpoint.mutex_.lock();
    }
    // Of an endpoint whose mutex the calling thread has locked.
    Turn(const Endpoint& endpoint, std::adopt_lock_t /*locked*/) REQUIRES(endpoint.mutex_)
        : endpoint_(endpoint) {}
    ~Turn() RELEASE() { endpoint_.end_turn(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const Endpoint& endpoint_;
  };
  void end_turn() const RELEASE(mutex_);
  void answer_questions() const noexcept REQUIRES(mutex_);
  // The result of ask(), which is called with the mutex held, by this thread or another one.
  template <class Ask>
  auto answer_to(std::chrono::milliseconds patience, const Ask& ask) const -> std::optional<decltype(ask())>;

  mutable Mutex questions_mutex_;  // taken after mutex_
  mutable std::list<Question*> questions_ GUARDED_BY(questions_mutex_);
  mutable std::atomic<bool> has_questions_{false};

  mutable Mutex mutex_;
  mutable CondVar session_begun_;
  std::function<void()> waker_ GUARDED_BY(mutex_);
  const Slots slots_;
  const ServiceLimits limits_;
  Service service_ GUARDED_BY(mutex_);
  ReplicationLog log_ GUARDED_BY(mutex_);
  HeldReplies held_ GUARDED_BY(mutex_);
  std::uint32_t assigned_ GUARDED_BY(mutex_) = 0;  // epoch of the last assignment
  std::vector<std::unique_ptr<Follower>> followers_ GUARDED_BY(mutex_);
  Moving moving_ GUARDED_BY(mutex_);
  std::set<StreamId> fenced_ GUARDED_BY(mutex_);  // incoming streams that were closed
  std::map<StreamId, std::uint64_t> released_
      GUARDED_BY(mutex_);  // sequence of the last RELEASE of arcs that left the Service
  std::uint64_t copy_rate_ GUARDED_BY(mutex_) = 0;  // bytes per second; 0: no limit
  double copy_allowed_ GUARDED_BY(mutex_) = 0;      // bytes that may be appended now
  Milliseconds copied_ GUARDED_BY(mutex_) = 0;      // when copy_allowed_ was computed
  Milliseconds take_at_ GUARDED_BY(mutex_) = 0;     // when pieces of copies are taken next
  Milliseconds copy_due_ GUARDED_BY(mutex_) = ReplicationLog::kNever;
  std::atomic<std::uint64_t> targets_version_{0};
  wire::Decoded decoded_ GUARDED_BY(mutex_);  // the current REPLICATE, or its reply
  Scans scans_;                               // last: its thread uses all others
};

template <class Ask>
auto Endpoint::answer_to(std::chrono::milliseconds patience, const Ask& ask) const
    -> std::optional<decltype(ask())> {
  std::optional<decltype(ask())> result;
  const auto try_now = [&] {
    if (!mutex_.try_lock()) {
      return false;
    }
    const Turn turn(*this, std::adopt_lock);
    result = ask();
    return true;
  };
  if (try_now()) {
    return result;
  }
  Question question{.ask = [&] { result = ask(); }};
  {
    const MutexLock lock(questions_mutex_);
    questions_.push_back(&question);
    has_questions_.store(true);
  }
  const bool is_free = try_now();  // who had the mutex may not have seen the question
  const auto end = std::chrono::steady_clock::now() + patience;
  const MutexLock lock(questions_mutex_);
  while (!is_free && !question.is_answered && std::chrono::steady_clock::now() < end) {
    question.answered.wait_until(questions_mutex_, end);
  }
  questions_.remove(&question);
  return result;
}

}  // namespace shoal
