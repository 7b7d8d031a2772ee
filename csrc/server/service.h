// Service: holds the arcs of one data loop and turns requests into replies, without a socket. It reads the time only
// for requests with the flag kTimed; no decision depends on it.
//
//   message -> decode -> job, worker -> table -> slices of the arcs (slots that are elsewhere are reported)
//           -> checks and limits for all slices -> Arc, or DeferredReads -> its reply, and the replies that it
//           releases
//
// service.cc has what a read and a write wait for. docs/consistency.md is the promise, docs/wire-format.md the
// messages.
//
// Invariants
//   I1  No read is deferred that may be answered. Under BSP no arc applies the clock of a deferred read.
//   I2  A worker's request is executed only if all arcs have its job and have admitted it. A request that throws is
//       executed when it is sent again, in those arcs and slots that have not executed it (I2 of server/arc.h).
//
// Bounds: of each job the deferred reads (number; bytes with their replies) and the pending pushes (bytes; those of
// later clocks may take half), and the bytes of a reply: else OVERLOADED. The rows: policy/budget.h.
//
// Threads: any; one mutex, which no call holds while it waits, and before it one for the calls that change arcs or
// make tables. Memory for replies comes from the reply queue's pool.

#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mix.h"
#include "base/statistic.h"
#include "server/arc.h"
#include "server/arc_copy.h"
#include "server/checkpoint_session.h"
#include "server/deferred_reads.h"
#include "server/disposal.h"
#include "server/histogram.h"
#include "server/hot_keys.h"
#include "server/key_list_cache.h"
#include "server/postponed_calls.h"
#include "server/reply_queue.h"
#include "server/scans.h"
#include "shard/shard.h"
#include "transport/multipart_message.h"
#include "wire/values.h"
#include "wire/wire.h"

namespace shoal {

struct ServiceLimits {
  std::size_t deferred_reads = 4096;
  std::size_t deferred_bytes = std::size_t{1} << 30U;
  std::size_t pending_bytes = std::size_t{1} << 30U;
  std::size_t reply_bytes = std::size_t{1} << 30U;
  std::size_t held_bytes = std::size_t{256}
                           << 20U;  // of replies that wait for a commit (server/replication_log.h)
  std::uint64_t request_bytes = std::uint64_t{1} << 30U;  // the transport has its own limit
  std::size_t key_list_bytes = std::size_t{64} << 20U;    // cached key lists
  std::shared_ptr<TierSpace> tier = {};                   // of all arcs (Arc::set_tier)
};

struct ServiceMetrics {
  std::uint64_t messages = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t replies = 0;
  std::uint64_t bytes_out = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(wire::kLastOp) + 1> requests{};  // by op
  std::array<std::uint64_t, 32> statuses{};                                           // of replies
  std::uint64_t duplicates = 0;      // writes, or slots of writes, that had been executed before
  std::uint64_t dropped_pushes = 0;  // of workers that were dismissed before their tick
  std::uint64_t failed_steps = 0;    // steps that failed, mostly for lack of memory; they are retried
  std::size_t deferred_reads = 0;
  std::size_t deferred_peak = 0;
  std::size_t deferred_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t pending_peak = 0;
  std::uint64_t budget_bytes = 0;  // for the rows of the slots that are served here; 0: no limit
  std::uint32_t applied = 0;
  std::uint32_t floor = 0;
  std::size_t key_lists = 0;  // cached
  std::size_t key_list_bytes = 0;
  std::uint64_t key_list_hits = 0;  // requests whose digest was found
  std::uint64_t key_list_misses = 0;
  std::uint64_t weight_bytes_saved = 0;  // in replies to pulls, by 16 bits or omitted zeros
  NarrowingErrors narrowed;              // weights that were sent in 16 bits
  std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks;  // (rank, clock) of the admitted workers
  // Of a named job; `applied`, `floor` and `clocks` above are those of the default job.
  struct NamedJob {
    std::uint32_t number = 0;
    std::uint32_t applied = 0;
    std::uint32_t floor = 0;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks{};
  };
  std::vector<NamedJob> jobs;
  Histogram pull_staleness;  // clocks between a pull and the slowest worker
  Histogram push_staleness;  // pushes of others to the table since the worker's last pull of it
};

inline constexpr auto kServiceStatistics = std::to_array<Statistic<ServiceMetrics>>({
    {"messages", number_of<&ServiceMetrics::messages>, Reported::kCounter, "Requests received"},
    {"replies", number_of<&ServiceMetrics::replies>, Reported::kCounter, "Replies sent"},
    {"bytes_in", number_of<&ServiceMetrics::bytes_in>, Reported::kCounter, "Bytes received"},
    {"bytes_out", number_of<&ServiceMetrics::bytes_out>, Reported::kCounter, "Bytes sent"},
    {"duplicates", number_of<&ServiceMetrics::duplicates>, Reported::kCounter,
     "Pushes that had been received before"},
    {"dropped_pushes", number_of<&ServiceMetrics::dropped_pushes>},
    {"failed_steps", number_of<&ServiceMetrics::failed_steps>, Reported::kCounter,
     "Steps that could not be applied"},
    {"deferred_reads", number_of<&ServiceMetrics::deferred_reads>, Reported::kGauge,
     "Pulls that wait for pushes of other workers"},
    {"deferred_peak", number_of<&ServiceMetrics::deferred_peak>},
    {"deferred_bytes", number_of<&ServiceMetrics::deferred_bytes>, Reported::kGauge,
     "Bytes of pulls that wait for pushes of other workers"},
    {"pending_bytes", number_of<&ServiceMetrics::pending_bytes>, Reported::kGauge,
     "Bytes of pushes that wait for those of other workers"},
    {"pending_peak", number_of<&ServiceMetrics::pending_peak>},
    {"budget_bytes", number_of<&ServiceMetrics::budget_bytes>, Reported::kGauge,
     "Memory that --memory allows for the rows; 0: no limit"},
    {"key_lists", number_of<&ServiceMetrics::key_lists>},
    {"key_list_bytes", number_of<&ServiceMetrics::key_list_bytes>},
    {"key_list_hits", number_of<&ServiceMetrics::key_list_hits>},
    {"key_list_misses", number_of<&ServiceMetrics::key_list_misses>},
    {"weight_bytes_saved", number_of<&ServiceMetrics::weight_bytes_saved>},
    {"deferrals",
     [](const ServiceMetrics& all) { return all.statuses[std::size_t(wire::Status::kDeferred)]; },
     Reported::kCounter, "Pulls that had to wait for pushes of other workers"},
});

class Service {
 public:
  static constexpr std::size_t kMinWaitingBytes = std::size_t{64} << 20U;  // bytes
  static constexpr std::size_t kMaxFunctionBytes = std::size_t{4}
                                                   << 20U;  // of an answer that is kept for its repetition

  // With an arc for each of these ranges, which ascend.
  Service(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits = {});
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // --- control: orders of the scheduler ------------------------------------------------------------------------------

  // Serves the slots of these ranges, which ascend, from now on. A range that has no arc yet gets one, with the tables that there
  // are; this is possible until the first job. Each arc serves at most one range.
  void set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges);
  // Adds the arcs of these slots to others, for another Service, and removes them here: each range is that of one arc. Deferred reads of
  // their slots are refused, and saves and loads in progress that include them are cancelled. Anything else in the arcs goes on where
  // they are adopted. If it throws, no arc has moved; it does not if the arcs are here and `to` has room for them.
  void take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to);
  // Takes over arcs of slots that have none here, and their tables: the pointers to them are null afterwards. Their slots are served
  // from the next set_map() on. If it throws, nothing has changed.
  void adopt(std::span<std::unique_ptr<Arc>> arcs);
  // A copy of an arc as of now, whose pieces are taken between requests. A save that begins cancels it. std::invalid_argument: there is
  // no such arc, or a table is being saved, copied or loaded.
  std::shared_ptr<ArcCopy> begin_copy(const SlotRange& range);
  // All of its pieces, for tests.
  std::vector<std::vector<std::byte>> save_arc(const SlotRange& range) const;
  // Frees arcs that are no longer needed, in a background thread.
  void discard(std::vector<std::unique_ptr<Arc>> arcs);

  // Starts a job without admitted workers, at clock 0. Tables stay. The default job replaces the last one, whose pending work is
  // dropped, and the tables' clocks continue from the clock `before` that it reached. A named job begins in addition to the others. No effect in
  // arcs where the job has already started.
  void start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before = 0,
                 bool is_named = false);
  // Ends a named job: pending work is dropped, and its number is refused. No effect if there is none.
  void end_job(std::uint32_t job);
  void admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
             std::uint32_t job = kDefaultJob);
  // Refuses the worker from now on and returns its last tick here; the others still wait for it. Its last clock may have
  // ended at one endpoint and not at another: the scheduler compares the answers of all.
  LastTick fence(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job = kDefaultJob);
  // Stops waiting for a worker. Its clocks count up to `last`, the greatest that any endpoint reported, as if its ticks had
  // arrived here too: once a tick is accepted anywhere, the pushes of its clock are everywhere. Returns the greatest clock
  // that any worker of the job has reached here.
  std::uint32_t dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last = {},
                        std::uint32_t job = kDefaultJob);
  std::uint32_t hold(std::uint32_t job = kDefaultJob);
  void resume(std::uint32_t job = kDefaultJob);

  // Sets the tables' memory budget, in bytes per slot; before the first table is added. Pending pushes and deferred reads are
  // then limited to a quarter of the budget of the slots here each, but not below kMinWaitingBytes; lower limits stay.
  void set_memory(std::uint64_t slot_bytes);
  // Adds a table to the arcs that do not have it. std::invalid_argument: there is another one of this number.
  void add_table(std::uint32_t id, const TableSpec& spec);
  // No effect if there is no such table.
  void drop_table(std::uint32_t id);
  std::vector<std::uint32_t> tables() const;
  // A copy of a table's current state, for tests.
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const;

  // Waits for the next session that begins, for at most `most`; null if there is none, or once close_sessions() was called. A
  // session must not outlive the service, which owns the shards' memory.
  std::shared_ptr<CheckpointSession> next_session(std::optional<std::chrono::milliseconds> most = {});
  // Cancels all sessions, and refuses new ones.
  void close_sessions();
  // Called before a save begins while there is no other, with the mutex held: if it returns false, the save is answered OVERLOADED.
  void set_save_filter(std::function<bool()> filter);

  // Called, with the mutex held, by a control call that has queued replies for released(); must not wait or call the service.
  void set_waker(std::function<void()> waker);
  // How the work in the rows is timed for requests that ask for it. Without a clock it takes 0 ns.
  using NanosecondClock = std::uint64_t (*)() noexcept;
  void set_clock(NanosecondClock clock);

  // --- data -----------------------------------------------------------------------------------------------------

  // Executes one message of a peer. Queues replies to it and to others. `received`: the message that has the frames; the service
  // may take some of them. Null: others own the frames. `received_ns`: when, by the clock; 0: unknown, and the reply has no times.
  void handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
              MultipartMessage* received = nullptr, std::uint64_t received_ns = 0) noexcept;
  // Replies OVERLOADED to a message, which is not executed: the peer asks again after a pause.
  void turn_away(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept;
  // Moves the replies that control calls have queued.
  void released(ReplyQueue& out) noexcept;

  // --- replication (server/replicated_service.h): one caller at a time, control calls included -----------------------------

  // What a write did to the arcs. They are asked in the order of their slots; where one fails, the later ones are not.
  struct Executed {
    std::vector<SlotRange> arcs{};  // that executed it, wholly or in part; none: it has changed nothing
    wire::Status status = wire::Status::kOk;
    bool has_keys = false;
    std::span<const std::uint64_t> key_list{};  // that its digest named; valid until the next call
  };
  // A write that waited for its clock and was executed by a later call.
  struct ReleasedWrite {
    wire::Header header;
    std::vector<std::byte> parameters;  // the frame: float64 of a SWEEP, numbers of a SAVE_BEGIN
    Executed executed;
  };
  // Whether executed() and take_released() report what each call does, from now on.
  void track_executed(bool tracks);
  const Executed& executed() const noexcept { return executed_; }
  std::vector<ReleasedWrite> take_released();
  // Executes a write that an equal Service has executed, in the arcs below `end_slot`. Map, limits and saves in progress are not
  // asked. The status of the reply, which is dropped.
  wire::Status replay(std::span<const wire::Frame> frames, std::size_t end_slot) noexcept;
  // The sum of the clocks that the arcs have applied, of all jobs, to compare two Services.
  std::uint32_t applied_sum(std::span<const SlotRange> arcs) const noexcept;
  std::vector<SlotRange> arcs() const;

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
  // Rows of a table of integers as they are now, for displays: no clock is awaited, and nothing is counted as a pull. A key without a
  // row reads 0. Empty if some of the slots are not served here, or there is no such table.
  std::vector<std::int64_t> peek(std::uint32_t id, std::span<const std::uint64_t> hashes) const;
  ServiceMetrics metrics() const;
  std::size_t slots() const noexcept { return slots_.count(); }

 private:
  struct Table;
  // A request: a received message, or a deferred one.
  struct Call {
    std::string_view peer;
    const wire::Header& header;
    std::span<const std::uint64_t> hashes;
    std::span<const float> floats;          // gradients, weights
    std::span<const std::uint32_t> counts;  // of a push's rows; empty: all are 1
    std::span<const std::byte> bytes;       // a section, or a function's parameters
    ReplyQueue& out;
    MultipartMessage* received = nullptr;  // has the frames of the arrays; null: none may be taken
    std::uint64_t received_ns = 0;         // of a request that asks for times; otherwise 0
  };
  // The slots that an arc serves.
  struct Served {
    Arc* arc;
    std::size_t first;
    std::size_t end;
  };
  // An arc's slice of a request.
  struct Slice {
    Arc* arc;
    std::size_t begin;  // in the hashes of the request
    std::size_t count;
    Arc::Fresh fresh;  // of a write
  };
  // A worker's use of a table, for the metrics of staleness under SSP and ASP.
  struct View {
    std::uint64_t pushes = 0;  // pushes of the table at the worker's last pull
    std::uint64_t own = 0;     // the worker's own pushes since then
  };
  struct JobRequests;
  // The answer to a function of all rows.
  struct FunctionAnswer {
    wire::Header request{};  // without a sequence: none
    std::vector<double> numbers{};
    std::vector<std::uint64_t> words{};
  };

  // service.cc: receiving a message, and replying
  static bool is_read(const wire::Header& header) noexcept;
  // Does with a message, which it has decoded, what serve(call) does.
  template <class Serve>
  void receive(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
               MultipartMessage* received, std::uint64_t received_ns, const Serve& serve) noexcept;
  void execute(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
               MultipartMessage* received, std::uint64_t received_ns) noexcept;
  void serve(const Call& call);
  void serve_write(const Call& call, Table& table);
  bool check_worker(const Call& call);
  // Replies that the slots of a request are elsewhere: no arc is here.
  void refuse_slots(const Call& call);
  // For requests that mean all slots of their map: false, after a reply, if the map is old.
  bool check_epoch(const Call& call);
  // Caches the key list of a message, or finds the one that its digest names: false, after a reply, if there is none.
  bool recall(Call& call);
  // Null also for a table that some arc does not have.
  Table* find(std::uint32_t id) noexcept;
  // Cuts hashes along the arcs that serve them, into slices_; the slots of the others are collected in refused_.
  void route(std::span<const std::uint64_t> hashes);
  void route_write(const Call& call);
  bool serves(std::size_t slot) const noexcept;
  void serve_ranges(const std::vector<SlotRange>& ranges);
  Arc* arc_of(std::size_t slot) const noexcept { return arc_of_[slot]; }
  // What there is of the requests of a job; null: there is no such job.
  JobRequests* find_job(std::uint32_t number) noexcept;
  const JobRequests* find_job(std::uint32_t number) const noexcept;
  // Of a request of an admitted worker.
  JobRequests& job_of(const Call& call) noexcept;
  static WorkerId worker_of(const wire::Header& header) noexcept {
    return {.job = header.job, .rank = header.worker};
  }
  // The state of a job in an arc that has it.
  static const JobState& state(const Arc& arc, std::uint32_t job) noexcept { return *arc.find_job(job); }
  // Of a job. The mode is the same in all arcs wherever it matters (I2).
  Mode mode(std::uint32_t job) const noexcept;
  std::uint32_t floor(std::uint32_t job) const noexcept;
  // The least and the greatest of the arcs.
  std::uint32_t applied(std::uint32_t job) const noexcept;
  std::uint32_t last_applied(std::uint32_t job) const noexcept;
  std::size_t pending_bytes(std::uint32_t job) const noexcept;
  std::size_t pending_bytes() const noexcept;
  // Of the clocks that are merged next.
  std::size_t next_bytes(std::uint32_t job) const noexcept;
  // The memory budget of the slots here; nullopt: some of them have none.
  std::optional<std::uint64_t> budget_bytes() const noexcept;
  void send(const Call& call, wire::Header header, std::size_t frames = 0, PooledBuffer first = {},
            PooledBuffer second = {});
  void send(const Call& call, wire::Status status);
  void send_text(const Call& call, wire::Status status, std::string_view text);
  // Replies OK, or WRONG_EPOCH with the slots in `refusal`, which was allocated before anything was changed.
  void send_done(const Call& call, PooledBuffer refusal, std::uint32_t aux = 0);
  PooledBuffer refusal(ReplyQueue& out) const;
  void fail(const Call& call, const std::exception& error) noexcept;
  // Calls work(), which uses rows; adds its time to shard_ns_ if the request asks for it.
  template <class Work>
  void in_shard(std::uint64_t received_ns, const Work& work) {
    if (received_ns == 0 || clock_ == nullptr) {
      return work();
    }
    const std::uint64_t begin = clock_();
    work();
    shard_ns_ += clock_() - begin;
  }

  // service_control.cc: orders of the scheduler
  template <class Change>
  void control(const Change& change);
  // The number of a job: that of the default job for kDefaultJob.
  std::uint32_t number_of(std::uint32_t job) const noexcept;
  void forget_worker(const WorkerId& worker);
  static std::unique_ptr<JobRequests> make_requests(std::uint32_t job);
  void replace_default_job(std::unique_ptr<JobRequests> requests);
  // Begins to take the requests of a job. Those of the last default job are dropped with what is kept for them.
  void begin_job(std::uint32_t job, bool is_named);
  void drop_requests(JobRequests& job);
  // Replies to the deferred reads of slots that are not served here any more.
  void refuse_deferred() noexcept;
  const Arc& find_arc(const SlotRange& range) const;
  // Of one arc, or of all.
  void cancel_copies(const Arc* arc = nullptr) noexcept;
  // After each change of arcs, workers or tables.
  void compare_arcs() noexcept;
  void index_arcs() noexcept;
  void limit_waiting() noexcept;

  // service_replay.cc
  // An arc is about to execute a write.
  void touch(const Arc& arc) {
    if (tracks_) {
      executed_.arcs.push_back({arc.first_slot(), arc.end_slot()});
    }
  }
  // Whether the write that is replayed failed before it reached this arc.
  bool skips(const Arc& arc) const noexcept { return arc.first_slot() >= replay_end_; }
  bool replays() const noexcept { return replay_end_ != kNoReplay; }

  // service_write.cc: PUSH, ASSIGN, ERASE, LOAD_*, TICK, SWEEP, and REDUCE where it changes rows
  void tick(const Call& call, std::span<const std::uint64_t> sequences,
            std::span<const std::uint32_t> tables);
  void push(const Call& call, Table& table);
  void assign(const Call& call, Table& table);
  void erase(const Call& call);
  void change(const Call& call);
  void sweep(const Call& call);
  static Arc::Write write_of(const Call& call) noexcept;
  // Whether all arcs have executed a call that names no slot; done_before() replies OK then.
  bool has_done(const Call& call);
  bool done_before(const Call& call);
  // Whether the worker is loading the table; otherwise replies with an error.
  bool check_loading(const Call& call, std::uint32_t table);
  void load_begin(const Call& call, Table& table, std::span<const std::uint64_t> rows);
  void load_rows(const Call& call);
  void load_filter(const Call& call);
  void load_end(const Call& call, std::span<const std::uint64_t> step);
  bool check_dim(const Call& call, const Table& table);
  // Integers are carried as the bits of float32: 16 bits would change them.
  bool check_dtype(const Call& call, const Table& table);
  // Whether its values are whole rows, that the table can have them, and the numbers of a row of the message.
  static bool is_whole(const Call& call) noexcept { return (call.header.flags & wire::kWhole) != 0; }
  bool check_whole(const Call& call, const Table& table);
  static std::size_t width_of(const Call& call, const Table& table) noexcept;
  // Why a BSP step of the table was not made in an arc of the slices; "" if none failed.
  std::string_view full(const Call& call) const noexcept;
  static wire::Status status_of_full(std::string_view why) noexcept {
    return why.starts_with(UserStepError::kPrefix) ? wire::Status::kInternal
                                                   : wire::Status::kResourceExhausted;
  }
  // Finds what is left of a write in each slice; false if nothing is.
  bool find_fresh(const Call& call);
  static Arc::Rows rows_of(const Call& call, const Slice& slice, std::size_t dim) noexcept;
  // Calls act(slice) for each slice of which something is left.
  template <class Act>
  void each_fresh(const Act& act);
  // Has the arcs keep a push until the end of its clock. False, after a reply, if that exceeds a limit.
  bool keep(const Call& call, std::size_t dim);
  // Whether a concurrent save has no memory for the rows that it would have to preserve: then replies OVERLOADED.
  bool postpone(const Call& call);
  PostponedCalls& postponed(const Call& call);
  View& view(const Call& call);

  // service_checkpoint.cc: SAVE_*
  void serve_save(const Call& call);
  void save_begin(const Call& call);
  void save_poll(const Call& call, std::span<const std::uint64_t> numbers);
  void save_end(const Call& call, std::span<const std::uint64_t> numbers);
  // The arcs have executed a call without effect on rows.
  void mark_all(const Call& call, std::uint64_t sequence);
  CheckpointSession* find_session(const CheckpointSession::Name& name) const noexcept;
  // Of all workers of a job or of one; loads, saves, or both.
  void cancel_sessions(std::uint32_t job, std::optional<std::uint32_t> rank = {},
                       std::optional<bool> loads = {});

  // service_read.cc: PULL, CONTAINS, STATE, SLOT, SECTION, STATS, REDUCE, SWEEP's dry run
  // Collects the slots of a read that are not here in refused_.
  void find_refused(const wire::Header& header, std::span<const std::uint64_t> hashes);
  void read(const Call& call, Table& table);
  void defer(const Call& call, std::size_t reply_bytes);
  std::size_t reply_bytes(const Call& call, const Table& table) const noexcept;
  void answer(const Call& call, Table& table);
  void answer_pull(const Call& call, Table& table);
  void send_weights(const Call& call, PooledBuffer values, std::size_t dim);
  std::uint32_t included(std::uint32_t job) const noexcept;
  void answer_contains(const Call& call);
  void answer_state(const Call& call, Table& table);
  void answer_slot(const Call& call);
  void answer_section(const Call& call);
  void answer_prefetch(const Call& call);
  void answer_stats(const Call& call);
  void send_numbers(const Call& call, std::span<const double> numbers);
  void send_words(const Call& call, std::span<const std::uint64_t> words);
  // The slot's shard, for reads of one slot.
  const Shard& shard_of(const Call& call) const;
  // The results of a function that only reads, of all slots here.
  std::vector<double> reduced(const Call& call);
  std::vector<std::uint64_t> swept(const Call& call);
  void answer_function(const Call& call);
  // Has a function of many rows computed beside the requests; false: it is computed now.
  bool begin_scan(const Call& call);
  void finish_scan(const Scan& scan) noexcept;
  // Calls use(shard, slices, begin) for each slice.
  template <class Use>
  void each_slice(const Call& call, const Use& use);
  static void add_words(std::vector<std::uint64_t>& sums, std::span<const std::uint64_t> words);
  static std::span<const double> doubles_of(const Call& call) noexcept {
    return {reinterpret_cast<const double*>(call.bytes.data()), call.bytes.size() / sizeof(double)};
  }

  // service_advance.cc: completed clocks, and the reads that they release
  bool is_complete(std::uint32_t job, std::uint32_t clock) const noexcept;
  // `received_ns`: as in the Call of a TICK, whose time includes the steps.
  void advance(ReplyQueue& out, std::uint64_t received_ns = 0) noexcept;
  void release(DeferredReads::Read&& read, ReplyQueue& out) noexcept;
  void execute_released(const Call& call);

  std::mutex arcs_mutex_;  // before mutex_: held by calls that change arcs, or make tables for them
  mutable std::mutex mutex_;
  std::function<void()> waker_;
  NanosecondClock clock_ = nullptr;
  const Slots slots_;
  const ServiceLimits given_limits_;
  ServiceLimits limits_;
  std::uint32_t epoch_ = 0;
  mutable ArcWorkspace workspace_;
  std::vector<std::unique_ptr<Arc>> arcs_;   // in the order of their slots
  std::vector<Arc*> arc_of_;                 // by slot; null: no arc has it
  std::vector<Served> served_;               // in the order of their slots
  bool has_begun_ = false;                   // some job has
  std::optional<std::uint64_t> slot_bytes_;  // the memory budget of arcs that are made here
  std::map<std::uint32_t, std::unique_ptr<Table>> tables_;
  Disposal disposal_;  // of replaced tables; declared after what they use

  std::vector<std::unique_ptr<JobRequests>> jobs_;  // the default job comes first
  KeyListCache key_lists_;
  HotKeys hot_keys_;
  std::vector<std::shared_ptr<CheckpointSession>>
      sessions_;  // in progress, or ended but still in use by a thread
  std::vector<std::shared_ptr<CheckpointSession>> unclaimed_sessions_;  // not yet taken by next_session()
  std::condition_variable session_begun_;
  std::vector<std::weak_ptr<ArcCopy>> copies_;
  std::function<bool()> save_filter_;
  bool sessions_closed_ = false;
  ReplyQueue released_{workspace_.buffers};

  // Replication.
  static constexpr std::size_t kNoReplay = std::numeric_limits<std::size_t>::max();
  bool tracks_ = false;
  Executed executed_;
  wire::Status last_status_ = wire::Status::kOk;  // of the last reply
  std::vector<ReleasedWrite> released_writes_;
  std::size_t replay_end_ = kNoReplay;
  ReplyQueue replayed_{workspace_.buffers};  // dropped

  // Scratch memory of the current request.
  wire::Decoded decoded_;
  std::uint64_t shard_ns_ = 0;
  std::vector<Slice> slices_;
  std::vector<std::uint16_t> refused_;

  mutable ServiceMetrics metrics_;
  Scans scans_;  // last: its thread uses all others
};

}  // namespace shoal
