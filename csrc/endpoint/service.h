// Service: the requests of one data loop as a state machine, without a socket, a lock or a thread. It reads
// the time only for requests with the flag kTimed; no decision depends on it. docs/consistency.md is the
// promise, docs/wire-format.md the messages.
//
// Invariants
//   I1  No read is deferred that may be answered. Under BSP no arc applies the clock of a deferred read.
//   I2  A worker's request is executed only if all arcs have its job and have admitted it. One that throws is
//       executed when it is sent again, where it was not executed (I1 of replica/arc.h).
//
// Bounds: of each job the deferred reads (number; bytes with their replies) and the pending pushes (bytes;
// those of later clocks may take half), and the bytes of a reply: else OVERLOADED. The rows: policy/budget.h.
//
// Threads: none of its own; one caller at a time (endpoint/endpoint.h has the mutex).

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "endpoint/request_context.h"
#include "endpoint/service_state.h"
#include "replica/arc_copy.h"

namespace shoal {

class Service {
 public:
  // With an arc for each of these ranges, which ascend.
  Service(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits = {});
  ~Service() { close_saves(); }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // --- control --------------------------------------------------------------------------------------------

  // Executes an order of the scheduler. What it means by the default job is the job of resolved().
  ArcResult apply(const Order& order);
  Order resolved(Order order) const { return state_.arcs.resolved(std::move(order)); }
  // Serves the slots of these ranges, which ascend, from now on (ArcGroup::serve).
  void set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges);
  // As ArcGroup::lacking() and add_shards(): the shards of a table are made without the Service.
  ArcGroup::ShardMakers lacking(std::uint32_t id, const TableSpec& spec) const {
    return state_.arcs.lacking(id, spec);
  }
  bool add_shards(std::uint32_t id, const TableSpec& spec,
                  std::span<const std::pair<std::size_t, std::shared_ptr<Shard>>> shards);
  std::vector<std::uint32_t> tables() const;
  // A copy of a table's current state, for tests.
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const { return state_.arcs.snapshot(id); }

  // Adds the arcs of these slots to others, for another owner, and removes them here: each range is that of
  // one arc. Deferred reads of their slots are refused, and saves and loads in progress that include them are
  // cancelled. Anything else in the arcs goes on where they are adopted. If it throws, no arc has moved; it
  // does not if the arcs are here and `to` has room for them.
  void take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to);
  // As ArcGroup::adopt().
  void adopt(std::span<std::unique_ptr<Arc>> arcs);
  void discard(std::vector<std::unique_ptr<Arc>> arcs) { state_.arcs.discard(std::move(arcs)); }
  std::vector<SlotRange> arcs() const { return state_.arcs.ranges(); }
  // A copy of an arc as of now, whose pieces are taken between requests. A save that begins cancels it.
  // std::invalid_argument: there is no such arc, or a table is being saved, copied or loaded.
  std::shared_ptr<ArcCopy> begin_copy(const SlotRange& range);
  // All of its pieces, for tests.
  std::vector<std::vector<std::byte>> save_arc(const SlotRange& range) const {
    return state_.arcs.find(range).save();
  }

  // The next save or load that begins; null: there is none. It must not outlive the service, which owns the
  // shards' memory.
  std::shared_ptr<CheckpointSession> take_session() noexcept { return state_.saves.take(); }
  bool has_session() const noexcept { return state_.saves.has_unclaimed(); }
  // Cancels all saves and loads, and refuses new ones.
  void close_saves() noexcept { state_.saves.close(); }
  bool has_closed_saves() const noexcept { return state_.saves.is_closed(); }
  // As Saves::set_filter().
  void set_save_filter(std::function<bool()> filter) { state_.saves.set_filter(std::move(filter)); }
  // How the work in the rows is timed for requests that ask for it. Without a clock it takes 0 ns.
  void set_clock(NanosecondClock clock) noexcept { state_.now_ns = clock; }
  // Has functions of many rows computed there; each ends by finish_scan().
  void set_scans(Scans* scans) noexcept { state_.scans = scans; }

  // --- data -----------------------------------------------------------------------------------------------

  // Executes one message of a peer. Queues replies to it and to others. `received`: the message that has the
  // frames; the service may take some of them. Null: others own the frames. `received_ns`: when, by the
  // clock; 0: unknown, and the reply has no times.
  void handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
              MultipartMessage* received = nullptr, std::uint64_t received_ns = 0) noexcept;
  // Replies OVERLOADED to a message, which is not executed: the peer asks again after a pause.
  void turn_away(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept;
  // Queues the reply to a request whose function was computed beside the others.
  void finish_scan(const Scan& scan) noexcept;
  // Moves the replies that control calls and finish_scan() have queued.
  void released(ReplyQueue& out) noexcept;
  bool has_released() noexcept { return !released_.replies().empty(); }

  // --- the log --------------------------------------------------------------------------------------------

  // What the last message did to the arcs.
  struct Executed {
    ChangedArcs changed{};
    wire::Status status = wire::Status::kOk;
    std::span<const std::uint64_t> key_list{};  // that its digest named; valid until the next call
  };
  const Executed& executed() const noexcept { return executed_; }
  // A write that waited for its clock and was executed by a later call.
  struct ReleasedWrite {
    wire::Header header;
    std::vector<std::byte> parameters;  // the frame: float64 of a SWEEP, numbers of a SAVE_BEGIN
    ChangedArcs changed;
    wire::Status status = wire::Status::kInternal;
  };
  // Whether take_released() reports such writes, from now on.
  void track_released(bool tracks);
  std::vector<ReleasedWrite> take_released() { return std::exchange(released_writes_, {}); }
  // As ArcGroup::applied_sum().
  std::uint32_t applied_sum(std::span<const SlotRange> ranges) const noexcept {
    return state_.arcs.applied_sum(ranges);
  }

  // --- figures --------------------------------------------------------------------------------------------

  // What an arc holds, and how many rows of it were read or changed since its tables were made here.
  struct ArcLoad {
    SlotRange range{};
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    std::uint64_t touched = 0;
  };
  std::vector<ArcLoad> arc_loads() const;
  // The tables of the arcs that it serves. Their counts are part of their state: they go where the arc goes.
  struct TableLoad {
    std::size_t first_slot = 0;  // of the arc
    std::uint32_t table = 0;
    ShardStats stats{};
    std::optional<TierStats> tier = {};
  };
  std::vector<TableLoad> table_loads() const;
  // The keys that pulls and pushes have named most often, and the number of samples.
  std::pair<std::vector<HotKey>, std::uint64_t> hot_keys(std::size_t most) const;
  // Rows of a table of integers as they are now, for displays: no clock is awaited, and nothing is counted as
  // a pull. A key without a row reads 0. Empty if some of the slots are not served here, or there is no such
  // table.
  std::vector<std::int64_t> peek(std::uint32_t id, std::span<const std::uint64_t> hashes) const;
  ServiceMetrics metrics() const;
  std::size_t slots() const noexcept { return state_.slots.count(); }

 private:
  // Decodes a message, and does with the request what serve(request) does.
  template <class Serve>
  void receive(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
               MultipartMessage* received, std::uint64_t received_ns, const Serve& serve) noexcept;
  Outcome serve(RequestContext& request);
  std::optional<Outcome> check_worker(RequestContext& request);
  // Caches the key list of a message, or finds the one that its digest names.
  std::optional<Refusal> recall(RequestContext& request);
  // The slots of a request are elsewhere: no arc is here.
  Outcome refuse_slots(RequestContext& request);
  // Queues the reply.
  void respond(RequestContext& request, Outcome outcome);
  // Queues what serve() returns, or the refusal that an exception means.
  template <class Serve>
  void answer_with(RequestContext& request, const Serve& serve) noexcept;
  void refuse(RequestContext& request, wire::Status status) noexcept;
  void send(RequestContext& request, wire::Header header, std::size_t frames, PooledBuffer first,
            PooledBuffer second);

  // Applies the clocks that have ended, and answers the reads that they release. `timed`: whose time the
  // steps are part of.
  void advance(ReplyQueue& out, RequestContext* timed = nullptr) noexcept;
  void release(DeferredReads::Read read, ReplyQueue& out) noexcept;
  Outcome execute_released(RequestContext& request);
  // Replies to the deferred reads for which is_refused(read) is true.
  template <class IsRefused>
  void release_if(const IsRefused& is_refused) noexcept;
  void refuse_deferred() noexcept;
  void forget_worker(const WorkerId& worker);
  // After a change of arcs, jobs, workers or tables.
  void follow(StateRoom room = {}) noexcept;

  ServiceState state_;
  ReplyQueue released_{state_.workspace.buffers};
  Executed executed_;
  bool tracks_ = false;
  std::vector<ReleasedWrite> released_writes_;
  wire::Decoded decoded_;  // of the current request
};

}  // namespace shoal
