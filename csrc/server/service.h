// Service: what one data loop knows and does. Requests in, replies out; no socket, no time, no thread.
//
// Idea. A data loop owns a contiguous range of slots, of every table. A message is checked (wire/wire.h), cut to the slots
// that are here, and done at once, or kept: a push until its clock is complete, a read until its clock may be read. What a
// request sets free for others leaves with its own reply.
//
//   BSP      pushes are kept (server/pending_pushes.h). Once all workers have ticked clock c, each table that any of them pushed to
//            gets one step with the merge of all pushes of c; `applied` becomes c + 1. A read at c waits for applied >= c,
//            and a pull that comes too late to see nothing of c is refused. A sweep at c waits likewise; its rows go
//            before the step of c.
//   SSP(s)   pushes act at once. A read at c waits until c - floor <= s, where all have ticked below `floor`.
//   ASP      pushes act at once, nothing waits.
//
//   a message  -> decode -> job, worker -> table -> slots that are here | slots that are not: told, the rest is done
//              -> slots that have seen this call (server/dedup_window.h): skipped, so sending again changes nothing
//              -> Shard, or PendingPushes, or DeferredReads -> reply, and whatever else may go now
//
// A save (server/checkpoint_session.h) is begun at a clock as a read is: what it holds is what a pull of that clock would see, in all of its
// tables. Others write it down, in threads of their own; it ends with the worker that began it at the latest. The rows of a
// load are sent, or the same threads read them.
//
// Writes (PUSH, ASSIGN, ERASE, LOAD_*, SWEEP, and functions that change) are done once per slot and sequence. A TICK is taken when
// it is the worker's next one and all pushes that it names have been here; taken already: told so again; else RETRY. It
// names them by epoch's map: WRONG_EPOCH if there is a newer one here.
// A change that a save beside it has no room for is told to come again, a few times: nothing here waits for a disk.
// Only workers that are admitted are served; wire::kAnonymous may read at any time, whatever the job.
//
// Invariants
//   I1  in BSP, applied() <= floor; nothing is kept for a clock below applied().
//   I2  no read is deferred that may go.
//   I3  an exception in a request leaves windows and clocks as they were: sent again, it is done. A push that memory
//       stopped halfway goes on where it was stopped, and so does a step of many workers.
//
// Bounds: reads that wait (number, bytes with their replies), pushes that are kept (bytes; those ahead of the next clock may
// take partial), bytes of a reply. Who meets one is told OVERLOADED, to come again. The rows' memory has a budget
// (policy/budget.h): who meets that is told RESOURCE_EXHAUSTED. A step of BSP that does is not made, and who pulls or pushes next is told.
//
// Threads: any; one mutex, which no call holds while it waits for anything. BufferPool of replies come from the reply_queue.

#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/threads.h"
#include "batch/merge.h"
#include "policy/budget.h"
#include "server/checkpoint_session.h"
#include "server/clocks.h"
#include "server/dedup_window.h"
#include "server/deferred_reads.h"
#include "server/disposal.h"
#include "server/histogram.h"
#include "server/key_list_cache.h"
#include "server/pending_pushes.h"
#include "server/reply_queue.h"
#include "shard/reductions.h"
#include "shard/shard.h"
#include "wire/values.h"
#include "wire/wire.h"

namespace shoal {

enum class Mode : std::uint8_t { kBsp, kSsp, kAsp };

// How far a worker came: its ticks, and the tables that the last of them named (under BSP).
struct LastTick {
  std::uint32_t clock = 0;
  std::vector<std::uint32_t> tables{};
};

struct ServiceLimits {
  std::size_t deferred_reads = 4096;
  std::size_t deferred_bytes = std::size_t{1} << 30U;
  std::size_t pending_bytes = std::size_t{1} << 30U;
  std::size_t reply_bytes = std::size_t{1} << 30U;
  std::uint64_t request_bytes = std::uint64_t{1} << 30U;  // the transport has a bound of its own
  std::size_t key_list_bytes = std::size_t{64} << 20U;    // key lists that may come again
};

struct ServiceMetrics {
  std::uint64_t messages = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t replies = 0;
  std::uint64_t bytes_out = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(wire::kLastOp) + 1> requests{};  // by op
  std::array<std::uint64_t, 32> statuses{};                                           // of replies
  std::uint64_t duplicates = 0;      // writes, or slots of them, that had been done before
  std::uint64_t dropped_pushes = 0;  // of workers that were dismissed before they ticked
  std::uint64_t failed_steps = 0;    // merges that memory, or something else, stopped; they are tried again
  std::size_t deferred_reads = 0;
  std::size_t deferred_peak = 0;
  std::size_t deferred_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t pending_peak = 0;
  std::uint32_t applied = 0;
  std::uint32_t floor = 0;
  std::size_t key_lists = 0;  // kept by their digests
  std::size_t key_list_bytes = 0;
  std::uint64_t key_list_hits = 0;  // requests whose digest stood for a list
  std::uint64_t key_list_misses = 0;
  std::uint64_t weight_bytes_saved = 0;  // of replies to pulls, in 16 bits or without zeros
  NarrowingErrors narrowed;              // weights that pulls asked for in 16 bits
  std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks;  // (rank, clock) of those admitted
  Histogram pull_staleness;  // clocks between a pull and the slowest worker when it was answered
  Histogram push_staleness;  // others' pushes to the table since the pusher's last pull of it
};

class Service {
 public:
  static constexpr std::size_t kMinWaitingBytes = std::size_t{64} << 20U;  // bytes

  // Owns the slots [first, end).
  Service(Slots slots, std::size_t first, std::size_t end, const ServiceLimits& limits = {});
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // --- control: from the scheduler ------------------------------------------------------------------------------

  void set_map(std::uint32_t epoch, std::size_t first, std::size_t end);
  // A new job begins with nobody admitted; what the last one left undone is forgotten, tables stay. Its clock starts at 0,
  // and the tables' clocks go on behind those that the job `before` reached. The job that is under way: nothing happens.
  void start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean, std::uint32_t before = 0);
  void admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock);
  // Takes nothing more from a worker, and says how far it came here; the others go on waiting for it. Its last clock may have
  // ended at one endpoint and not at another: who orders this compares the answers of all.
  LastTick fence(std::uint32_t rank, std::uint32_t incarnation);
  // Waits no longer for a worker. Its clocks count up to the greatest that any endpoint has told, as if its ticks had come
  // here, too: when a tick has been taken anywhere, the pushes of its clock are everywhere. Returns the greatest clock that
  // any worker has reached here.
  std::uint32_t dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last = {});
  std::uint32_t hold();
  void resume();

  // What the tables may keep of a slot, in bytes; before the first table is there. What waits then takes a quarter of all
  // slots' here at most, pushes and reads each, but for kMinWaitingBytes; limits that are lower stay.
  void set_memory(std::uint64_t slot_bytes);
  void add_table(std::uint32_t id, const TableSpec& spec);
  void drop_table(std::uint32_t id);
  std::vector<std::uint32_t> tables() const;
  // A copy of a table as it stands, for checks.
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const;

  // The next save that was begun: waits for it; null once close_sessions() was called. Of the shards' memory, which ends with
  // this, a save may not outlive it.
  std::shared_ptr<CheckpointSession> next_session();
  // Gives up all saves that are under way, and those that come.
  void close_sessions();

  // Called, with the mutex held, by a control call that left replies for released(): it must not wait, nor call back.
  void set_waker(std::function<void()> waker);

  // --- data -----------------------------------------------------------------------------------------------------

  // One message of a peer. Adds replies, to it and to others.
  void handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept;
  // Replies that control calls have set free.
  void released(ReplyQueue& out) noexcept;

  ServiceMetrics metrics() const;
  std::size_t slots() const noexcept { return slots_.count(); }

 private:
  struct Table;
  // A request, its message or what was deferred of it.
  struct Call {
    std::string_view peer;
    const wire::Header& header;
    std::span<const std::uint64_t> hashes;
    std::span<const float> floats;          // gradients, weights
    std::span<const std::uint32_t> counts;  // of a push's rows; empty: one each
    std::span<const std::byte> bytes;       // of a section, of a function's parameters
    ReplyQueue& out;
  };
  // Hashes and their gradients or weights, and how often they occurred, cut for a Shard.
  struct Part {
    SlotSlices slices;
    std::span<const float> values;
    std::span<const std::uint32_t> counts;
  };
  // What a worker has been seen to do with a table, where pushes act at once.
  struct View {
    std::uint64_t pushes = 0;  // of the table, at the worker's last pull
    std::uint64_t own = 0;     // the worker's since
  };

  // service.cc: a message's way in, and its reply
  static bool is_read(const wire::Header& header) noexcept;
  void serve(const Call& call);
  void serve_write(const Call& call, Table& table);
  bool check_worker(const Call& call);
  // Of what names no slots and means those of its map: false for an old map, which was told.
  bool check_epoch(const Call& call);
  // Keeps the list that a message brought, or finds the one that it names: false where there is none, which was told.
  bool recall(Call& call);
  Table* find(std::uint32_t id) noexcept;
  // Notes the slots of hashes that are not here; the part that is.
  std::span<const std::uint64_t> own(std::span<const std::uint64_t> hashes, std::size_t& first);
  bool owns(std::size_t slot) const noexcept { return slot >= first_slot_ && slot < end_slot_; }
  SlotSlices cut(std::span<const std::uint64_t> hashes);
  void send(const Call& call, wire::Header header, std::size_t frames = 0, PooledBuffer first = {},
            PooledBuffer second = {});
  void send(const Call& call, wire::Status status);
  void send_text(const Call& call, wire::Status status, std::string_view text);
  // OK, or WRONG_EPOCH with the slots that are not here, in a block that was taken before anything was changed.
  void send_done(const Call& call, PooledBuffer refusal, std::uint32_t aux = 0);
  PooledBuffer refusal(ReplyQueue& out) const;
  void fail(const Call& call, const std::exception& error) noexcept;

  // service_control.cc: what the scheduler says
  template <class Change>
  void control(const Change& change);
  void forget_worker(std::uint32_t rank);

  // service_write.cc: PUSH, ASSIGN, ERASE, LOAD_*, TICK, SWEEP, and REDUCE where it changes rows
  void tick(const Call& call, std::span<const std::uint64_t> sequences,
            std::span<const std::uint32_t> tables);
  // Ends a clock of a worker.
  void end_clock(std::uint32_t rank, std::span<const std::uint32_t> tables);
  void push(const Call& call, Table& table);
  void assign(const Call& call, Table& table);
  void erase(const Call& call, Table& table);
  void change(const Call& call, Table& table);
  void sweep(const Call& call, Table& table);
  // Whether a call that is of no slot has been done; then it is told so.
  bool done_before(const Call& call, DedupWindow& dedup);
  // Whether the worker's load of the table is under way; else it is told so.
  bool check_loading(const Call& call, const Table& table);
  void load_begin(const Call& call, Table& table, std::span<const std::uint64_t> rows);
  void load_rows(const Call& call, Table& table);
  void load_filter(const Call& call, Table& table);
  void load_end(const Call& call, Table& table, std::span<const std::uint64_t> step);
  DedupWindow& history(std::uint32_t rank);
  bool check_dim(const Call& call, const Table& table);
  // The part of a write that is here and was not done yet; none where there is nothing left to do.
  std::optional<Part> fresh_part(const Call& call, std::size_t dim, DedupWindow& dedup);
  static void mark(const Call& call, const SlotSlices& slices, DedupWindow& dedup) noexcept;
  bool keep(const Call& call, const Part& part);
  // Whether the rows that a save has to keep for this change leave no room for it: then it was told to come again.
  bool postpone(const Call& call, const Table& table, DedupWindow& dedup, std::size_t rows);
  void step(const Call& call, Table& table, const Part& part, DedupWindow& dedup);
  static View& view(Table& table, std::uint32_t rank);

  // service_checkpoint.cc: SAVE_*
  void serve_save(const Call& call);
  void save_begin(const Call& call);
  void save_poll(const Call& call, std::span<const std::uint64_t> numbers);
  void save_end(const Call& call, std::span<const std::uint64_t> numbers);
  CheckpointSession* find_session(const CheckpointSession::Name& name) const noexcept;
  // Those of a worker, or of all; only loads, or what is none, or both.
  void cancel_sessions(std::optional<std::uint32_t> rank, std::optional<bool> loads = {});

  // service_read.cc: PULL, CONTAINS, STATE, SLOT, SECTION, STATS, REDUCE, SWEEP's dry run
  // Notes the slots of a read that are not here.
  void find_refused(const wire::Header& header, std::span<const std::uint64_t> hashes);
  void read(const Call& call, Table& table);
  void defer(const Call& call, std::size_t reply_bytes);
  std::size_t reply_bytes(const Call& call, const Table& table) const noexcept;
  void answer(const Call& call, Table& table);
  void answer_pull(const Call& call, Table& table);
  void send_weights(const Call& call, PooledBuffer values, std::size_t dim);
  void answer_contains(const Call& call, Table& table);
  void answer_state(const Call& call, Table& table);
  void answer_slot(const Call& call, Table& table);
  void answer_section(const Call& call, Table& table);
  void answer_stats(const Call& call, Table& table);
  void send_numbers(const Call& call, std::span<const double> numbers);
  void send_words(const Call& call, std::span<const std::uint64_t> words);
  // What a table answers to a SWEEP now.
  std::vector<std::uint64_t> swept(const Call& call, Table& table, bool dry_run);
  static std::span<const double> doubles_of(const Call& call) noexcept {
    return {reinterpret_cast<const double*>(call.bytes.data()), call.bytes.size() / sizeof(double)};
  }

  // service_advance.cc: clocks that are complete, and the reads that may go
  bool is_complete(std::uint32_t clock) const noexcept;
  void advance(ReplyQueue& out) noexcept;
  void apply_clock();
  void apply(std::uint32_t id, Table& table, PendingPushes::ClockStep& turn);
  void release(DeferredReads::Read&& read, ReplyQueue& out) noexcept;

  mutable std::mutex mutex_;
  std::function<void()> waker_;
  const Slots slots_;
  ServiceLimits limits_;
  mutable ThreadPool pool_{1};  // of the shards: a data loop is one thread
  std::unique_ptr<Budget> budget_;
  std::uint32_t epoch_ = 0;
  std::size_t first_slot_;
  std::size_t end_slot_;

  std::uint32_t job_ = 0;
  Mode mode_ = Mode::kBsp;
  std::uint32_t staleness_ = 0;
  bool mean_ = false;
  Clocks clocks_;
  std::uint32_t applied_ = 0;
  std::vector<std::unique_ptr<DedupWindow>> dedup_;      // by rank, once it writes
  std::vector<std::vector<std::uint32_t>> tick_tables_;  // by rank: what its last tick named, under BSP
  std::map<std::uint32_t, std::unique_ptr<Table>> tables_;
  Disposal disposal_;  // of tables that others have replaced: after what they use

  BufferPool buffers_;  // of what is kept and deferred, and of replies that control calls set free
  PendingPushes pending_;
  DeferredReads deferred_;
  KeyListCache key_lists_;
  std::vector<std::shared_ptr<CheckpointSession>>
      sessions_;  // under way, or ended while somebody still takes from them
  std::vector<std::shared_ptr<CheckpointSession>> unclaimed_sessions_;  // that nobody writes yet
  std::condition_variable session_begun_;
  bool sessions_closed_ = false;
  ReplyQueue released_{buffers_};

  // Worked in, one request at a time.
  wire::Decoded decoded_;
  std::vector<std::uint64_t> offsets_;  // slots + 1
  std::vector<std::uint16_t> refused_;
  Buffer<std::uint64_t> some_hashes_;  // of the slots that have not seen a call
  Buffer<float> some_values_;
  Buffer<std::uint32_t> some_counts_;
  Buffer<std::uint32_t> ones_;  // of pushes that came without counts, to be merged with others
  MergeScratch merge_scratch_;

  mutable ServiceMetrics metrics_;
};

}  // namespace shoal
