// Call: one operation that a user requested, and Part: one message of it, to one endpoint.
//
//   Keyed    PULL, CONTAINS, STATE read rows into `out`; PUSH, ASSIGN send rows from `values`; ERASE,
//            PREFETCH have neither
//   OfSlot   SLOT, SECTION, LOAD_ROWS, LOAD_FILTER: one slot; SAVE_POLL, SAVE_END: the endpoint of a slot
//   OfAll    STATS, REDUCE, SWEEP, LOAD_BEGIN, LOAD_END, SAVE_BEGIN, SAVE_END: each that serves slots
//   Ending   TICK: the end of a clock, to each endpoint with the list of its pushes
//   Composed PULL, PUSH: has no messages; whoever made it of other calls settles it (client/cached_rows.h)
//
// Arrays are referred to, not copied: `keep` owns them, and is released when the call is settled. Nothing
// writes to `out` after that.
//
// Threads: those of its owner, Requests; `is_done()` and what is settled may be read by any thread once
// `is_done()`.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/units.h"
#include "client/filter.h"
#include "client/slot_map.h"
#include "client/timers.h"
#include "transport/shared_frame.h"
#include "wire/times.h"
#include "wire/wire.h"

namespace shoal::client {

class Call;
using CallPtr = std::shared_ptr<Call>;

// When to send again, and how much at a time. Times are in seconds.
struct Policy {
  Seconds resend_after = 1.0;  // time without an answer after which a part is sent again
  double backoff = 2.0;        // factor by which each further wait is longer
  Seconds longest = 30.0;      // upper bound of these waits
  double bytes_per_second =
      10e6;                      // assumed lower bound: the bytes in flight add their share to `resend_after`
  Seconds deferred_after = 5.0;  // as `resend_after`, for a part that the server has deferred
  Seconds pause = 0.02;          // after "not now", growing by `backoff`,
  Seconds longest_pause = 1.0;   // but no longer than this
  std::uint64_t credit = 64 * MiB;  // bytes in flight to one endpoint
  // Payload of one message, request or answer. Larger parts are cut, so that both sides compute on some while
  // others are transferred.
  std::uint64_t message_bytes = MiB;
  std::uint64_t largest_message = 64 * MiB;  // bytes that a server accepts
};

// The numbers by which servers know a worker.
struct WorkerIdentity {
  std::uint32_t rank = wire::kAnonymous;
  std::uint32_t incarnation = 0;
  std::uint32_t job = 0;
};

// The exception that a failed call raises.
enum class ErrorKind : std::uint8_t {
  kShoal,
  kDeadlineExceeded,
  kDependency,
  kMemoryBudgetExceeded,
  kNotConnected,
  kProtocol,
  kServerLost,
  kFenced,
  kClosed,
  kUserCode,
  kGiven,  // by whoever ended the client: Failure::given
};

struct Failure {
  ErrorKind kind = ErrorKind::kShoal;
  std::string text{};
  std::shared_ptr<const void> given{};
};

struct Keyed {
  std::span<const std::uint64_t> hashes{};
  std::span<const std::uint64_t> begins{};  // of each slot's hashes, and their end
  std::span<const std::byte> values{};      // one row of width bytes for each hash
  std::span<const std::uint32_t> counts{};  // of a push: how often each row occurred; empty: once
  std::span<std::byte> out{};               // one row of width bytes for each hash
  std::size_t width = 0;                    // bytes of a row in `values` or `out`
  std::uint16_t dim = 0;                    // in the header
  std::uint32_t aux = 0;
  Filter* filter = nullptr;
  std::uint32_t ahead =
      0;                  // clocks by which a pull is for a later one: it waits as a pull of that clock does
  bool is_dated = false;  // whether the answers shall say which clocks they include
  bool is_whole = false;  // whether values are whole rows, or what local steps have changed in them
};

struct OfSlot {
  std::uint32_t slot = 0;
  Payload payload{};
  std::uint32_t count = 0;
  std::uint32_t aux = 0;
  wire::Dtype dtype = wire::Dtype::kNone;
};

struct OfAll {
  Payload payload{};
  std::uint32_t count = 0;
  std::uint32_t aux = 0;
  wire::Dtype dtype = wire::Dtype::kNone;
  bool is_write = false;
  bool is_per_slot = false;       // the answers have equally many numbers for each slot
  bool is_user_function = false;  // the answers may say that it has failed
};

struct Ending {
  std::vector<std::uint32_t> tables{};  // pushed to in the clock, ascending
};

struct Composed {
  std::vector<CallPtr> calls{};  // of which it is made, as far as their failures are its own
};

using Operation = std::variant<Keyed, OfSlot, OfAll, Ending, Composed>;

// Is told that a call is settled by the owner of the requests, when nothing else is under way there.
class CallObserver {
 public:
  virtual void settled(const CallPtr& call) = 0;

 protected:
  CallObserver() = default;
  CallObserver(const CallObserver&) = default;
  CallObserver& operator=(const CallObserver&) = default;
  ~CallObserver() = default;
};

// The state that a worker keeps of one endpoint.
struct Part;
struct Peer {
  Peer(Endpoint of, std::uint64_t number) : endpoint(std::move(of)), id(number) {}

  Endpoint endpoint;
  std::uint64_t id;                                // of its address
  std::deque<Part*> queue{};                       // not sent yet, in their order
  std::map<std::uint32_t, std::uint32_t> reads{};  // unanswered parts that a tick waits for, by clock
  KnownLists lists{};
  std::uint64_t bytes = 0;  // in flight
  std::optional<Seconds> first_sent{};
  std::optional<Seconds> last_reply{};
  std::uint32_t ends = 0;  // connections that have ended
  std::string ended{};     // why the last one has

  // In messages to users: when it last answered.
  std::string silence(Seconds now) const;
};

// What was noted of a part, of a call that is traced.
struct PartTrace {
  Endpoint endpoint{};
  std::uint64_t keys = 0;
  Seconds begun = 0;
  Seconds sent = 0;   // last
  Seconds ended = 0;  // 0: not yet
  std::uint64_t bytes = 0;
  std::uint64_t received_bytes = 0;
  bool is_answered = false;
  std::optional<wire::ServerTimes> times{};
  std::vector<std::pair<std::string, Seconds>> events{};  // repetitions, and statuses that did not settle it
};

struct Part : Timer {
  Part(Call& of, Peer& to, std::uint32_t first, std::uint32_t end_of, std::size_t from, std::size_t until)
      : call(&of), peer(&to), first_slot(first), end_slot(end_of), begin(from), end(until) {}

  Call* call;
  Peer* peer;
  std::uint32_t first_slot;
  std::uint32_t end_slot;
  std::size_t begin;  // of the call's hashes
  std::size_t end;
  std::uint64_t sequence = 0;
  std::uint8_t number = 0;
  std::uint64_t bytes = 0;                // of request and answer
  std::uint64_t sent_number = 0;          // place among all parts that were sent; 0: it was not
  wire::Header header{};                  // of the message
  EncodedPayload encoded{};               // its frames
  bool has_message = false;               // it is encoded
  bool is_filtered = false;               // by a filter
  bool is_queued = false;                 // in the queue of its endpoint
  bool is_charged = false;                // its bytes are in flight
  wire::Status last = wire::Status::kOk;  // of the last reply that did not settle it
  Seconds sent = 0;
  std::uint32_t tries = 0;
  std::uint32_t pauses = 0;
  std::uint32_t doubts = 0;
  std::optional<std::size_t> trace{};  // place in the trace of its call

  std::size_t rows() const noexcept { return end - begin; }
};

// What an endpoint has answered, where rows are not written to `out`.
struct Answer {
  std::string address{};
  std::uint32_t count = 0;
  std::uint16_t dim = 0;
  std::uint32_t aux = 0;
  wire::Dtype dtype = wire::Dtype::kNone;
  std::vector<std::uint64_t> hashes{};
  std::vector<std::byte> values{};
};

class Call : public Timer, public std::enable_shared_from_this<Call> {
 public:
  Call(wire::Op op_of, std::uint32_t table_of, std::uint32_t clock_of, Seconds now, Seconds until,
       Operation operation)
      : op(op_of),
        table(table_of),
        clock(clock_of),
        started(now),
        deadline(until),
        what(std::move(operation)) {
    is_call = true;
  }

  const wire::Op op;
  const std::uint32_t table;
  const std::uint32_t clock;
  Seconds started;
  Seconds deadline;
  Operation what;
  std::shared_ptr<const void> keep{};
  std::uint64_t sequence = 0;     // of a write; 0 of others
  std::uint64_t serial = 0;       // order of submission, also of parts that are cut again
  std::uint64_t repetitions = 0;  // of all messages, before it was submitted
  bool was_held = false;          // it began later than it was submitted
  CallObserver* observer = nullptr;

  // Once it is settled.
  bool is_done() const noexcept { return done_.load(std::memory_order_acquire); }
  std::optional<Failure> failure{};
  std::uint64_t total = 0;  // rows erased; answers to a prefetch that said there are rows on disk
  std::optional<std::uint32_t> included{};          // clocks that all answers of a dated pull include
  std::vector<Answer> answers{};                    // in slot order
  std::unique_ptr<std::vector<PartTrace>> trace{};  // of a call that is traced
  std::uint64_t held_bytes = 0;                     // of its arrays; the owner's
  Seconds begun_at = 0;                             // the owner's
  Seconds settled_at = 0;

  // In messages to users.
  std::string name() const;
  const Keyed* keyed() const noexcept { return std::get_if<Keyed>(&what); }
  bool is_composed() const noexcept { return std::holds_alternative<Composed>(what); }
  bool is_everywhere() const noexcept {
    return std::holds_alternative<OfAll>(what) || std::holds_alternative<Ending>(what);
  }

 private:
  friend class Requests;
  friend class HeldCalls;

  std::atomic<bool> done_{false};
  std::vector<std::unique_ptr<Part>> parts_;                         // queued or sent, not answered
  std::uint32_t misrouted_ = 0;                                      // runs of slots that wait for a map
  std::uint64_t begun_ = 0;                                          // place among all calls that have begun
  std::vector<std::pair<std::uint64_t, std::uint8_t>> next_number_;  // of the next part, by endpoint
  std::vector<Call*> waits_for_;                                     // of a held call
  std::vector<Call*> followers_;                                     // held calls that wait for this one
  CallPtr follows_;                                                  // a push whose effect a pull has to see
  std::vector<Call*> pulls_;                                         // that follow this push
  bool is_marked_ = false;  // a pull that was sent behind its push: to be repeated if anything was
  bool is_held_ = false;
};

// Bytes of a row in the larger of request and answer.
std::size_t row_bytes(const Call& call) noexcept;

}  // namespace shoal::client
