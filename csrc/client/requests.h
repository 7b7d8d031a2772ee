// Requests: the pending requests of a worker: cut by endpoint, sent, sent again, answered or given up
// (requests.cc). Without I/O or a clock: the same object runs over ZeroMQ and in a simulated network.
//
// Invariants (verify() checks I1, I2, I5 and I6 as far as the state shows them)
//   I1  A write's sequence is less than 64 above the lowest unsettled one: that is how many a slot remembers.
//   I2  Bytes in flight to an endpoint, requests and their answers, are at most `credit`, except for one part
//       alone and repetitions. A part that is deferred or refused for now is not in flight.
//   I3  Parts are sent to an endpoint in the order in which they were submitted; only repetitions overtake.
//   I4  A settled call is never written to: a late answer is ignored.
//   I5  A tick is sent to an endpoint after the pushes and the answered reads of its clock (requests.cc).
//   I6  Every unsettled call has a time at which on_time() acts on it, its deadline at the latest; a composed
//       one has those of the calls that it is made of.
//
// Threads: one at a time; the owner locks. Arrays are not copied: unchanged until the call is settled.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/statistic.h"
#include "base/units.h"
#include "client/call.h"
#include "client/held_calls.h"
#include "client/slot_map.h"
#include "client/timers.h"
#include "wire/wire.h"

namespace shoal::client {

inline constexpr std::uint64_t kMaxReplyBytes = GiB;

// Counts since the start.
struct RequestCounts {
  std::uint64_t sent = 0;
  std::uint64_t resent = 0;
  std::uint64_t answers = 0;
  std::uint64_t strays = 0;   // replies that are late, or to nobody
  std::uint64_t garbled = 0;  // messages that cannot be read
  std::uint64_t deferred = 0;
  std::uint64_t refused = 0;  // slots
  std::uint64_t retry = 0;
  std::uint64_t overloaded = 0;
  std::uint64_t not_admitted = 0;
  std::uint64_t bad_request = 0;
  std::uint64_t reconnected = 0;
  std::uint64_t moved = 0;  // parts that a newer map has sent elsewhere
};

inline constexpr auto kRequestStatistics = std::to_array<Statistic<RequestCounts>>({
    {"sent", number_of<&RequestCounts::sent>},
    {"resent", number_of<&RequestCounts::resent>},
    {"answers", number_of<&RequestCounts::answers>},
    {"strays", number_of<&RequestCounts::strays>},
    {"garbled", number_of<&RequestCounts::garbled>},
    {"deferred", number_of<&RequestCounts::deferred>},
    {"refused", number_of<&RequestCounts::refused>},
    {"retry", number_of<&RequestCounts::retry>},
    {"overloaded", number_of<&RequestCounts::overloaded>},
    {"not_admitted", number_of<&RequestCounts::not_admitted>},
    {"bad_request", number_of<&RequestCounts::bad_request>},
    {"reconnected", number_of<&RequestCounts::reconnected>},
    {"moved", number_of<&RequestCounts::moved>},
});

// Mistakes that a test plants, to see that its checkers find them.
enum class Defect : std::uint8_t {
  kNone,
  kForgetsRefusedSlots,
  kResendsWithANewSequence,
  kTakesEarlyForDone,
  kTicksBeforeItsReads,
  kTicksBeforeItsPushesAreEverywhere,
  kSendsOnce,
  kDoneByTheFirstPart,
  kTakesAnyAnswer,
  kKeepsItsOldMap,
  kRenumbersPushes,
  kRenumbersOtherWrites,
  kLosesCounts,
  kTakesRowsBehindARepeatedPush,
  kLeavesBeforeAFilteredPush,
};

// A message to be sent.
struct Outgoing {
  Peer* peer;
  wire::Header header;
  Payload payload;
};

// What a call comes after, and how it is settled.
struct Terms {
  std::span<const CallPtr> after{};    // begins when these have succeeded
  CallPtr follows{};                   // a push that a pull has to see
  std::shared_ptr<const void> keep{};  // owns the arrays
  std::uint64_t given_keys = 0;        // of a pull, with repetitions; for counts
  bool is_traced = false;
};

// Where an endpoint has executed a part of a pull or a push.
struct Executed {
  std::uint64_t serial = 0;  // of the call
  std::uint32_t table = 0;
  std::uint32_t first_slot = 0;
  std::uint32_t end_slot = 0;
  std::uint32_t position = 0;  // pushes of the table before a pull, or up to this one; of a push 0: unknown
  bool is_push = false;
};

class Requests {
 public:
  static constexpr std::uint64_t kWindow = 64;  // sequences that a slot remembers

  Requests(const WorkerIdentity& worker, SlotMap map, const Policy& policy, bool atomic_clocks);
  ~Requests();
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  const SlotMap& map() const noexcept { return map_; }
  const RequestCounts& counts() const noexcept { return counts_; }
  // Messages that were sent again, or to another endpoint.
  std::uint64_t repetitions() const noexcept { return counts_.resent + counts_.refused + counts_.moved; }

  // Starts a call. Throws std::invalid_argument if the rows of a slot need more bytes than a server takes, or
  // arrays have the wrong sizes.
  CallPtr submit(wire::Op op, std::uint32_t table, std::uint32_t clock, Seconds now, Seconds deadline,
                 Operation what, Terms terms = {});
  // Ends a clock: sends every endpoint the list of its pushes. `tables`: pushed to in it, ascending.
  CallPtr tick(std::uint32_t clock, std::vector<std::uint32_t> tables, Seconds now, Seconds deadline,
               bool is_traced = false);
  // Starts a call that is made of others: complete() settles it.
  CallPtr compose(wire::Op op, std::uint32_t table, std::uint32_t clock, Seconds now, bool is_traced = false);
  void complete(const CallPtr& composed, Seconds now, std::optional<Failure> failure = {}) {
    settle(composed, now, std::move(failure));
  }
  // Whether a tick is unsent at some endpoint, only because pushes are unacknowledged at others.
  bool waits_for_pushes(const Call& tick) const;

  // Processes a message from an endpoint, whatever it contains. False: it is damaged.
  bool receive(const std::string& address, std::span<const wire::Frame> frames, Seconds now);
  // Sends unanswered parts again, and settles calls that have passed their deadline.
  void on_time(Seconds now);
  // When on_time() is next due; kNever if nothing is.
  Seconds next_time() const noexcept { return timers_.next(); }
  // Sends again at once, in order, what an endpoint has not answered, after its connection was replaced.
  void reconnected(const std::string& address, const std::string& reason, Seconds now);

  // Whether a newer map is needed: pass the scheduler's map to set_map(), even if it is the same.
  bool wants_map() const noexcept { return !refused_.empty(); }
  // Uses another map. Parts in flight stay at their endpoint if it still owns their slots. Everything else is
  // cut again: refused slots, unsent parts, and parts at endpoints that have changed. A call to every
  // endpoint begins again as a whole: an answer of an endpoint is for the slots that it had. A map that is
  // not newer only makes refused slots be sent again after a pause.
  void set_map(SlotMap map, Seconds now);
  // Treats a server as lost: calls that wait for it, and later ones that need it under the present map, fail.
  void lose(std::uint32_t server, const std::string& reason, Seconds now);
  // Settles every call, also later ones, with this failure. Nothing is sent any more.
  void close(Failure failure, Seconds now);
  // Calls that fail from now on have this failure: the servers refuse a process that leaves.
  void leave(Failure failure) { left_ = std::move(failure); }

  bool has_outgoing() const noexcept { return !outgoing_.empty(); }
  // The next message. What cannot be sent may be dropped: it is treated as lost, and sent again.
  Outgoing take_outgoing();
  // Calls that were settled since the last time, in their order.
  std::vector<CallPtr> take_settled() { return std::exchange(settled_, {}); }
  bool has_settled() const noexcept { return !settled_.empty(); }

  // Keeps, from now on, where pulls and pushes of these tables were executed, under SSP and ASP.
  void log_order(std::set<std::uint32_t> tables) { ordered_ = std::move(tables); }
  // What was kept since the last time, in the order of the answers.
  std::vector<Executed> take_order() { return std::exchange(order_, {}); }

  // Number of timers and calls, for tests of growth.
  std::size_t timers() const noexcept { return timers_.size(); }
  // "" if all invariants hold.
  std::string verify() const;
  void plant(Defect defect) noexcept { defect_ = defect; }

 private:
  // Slots of a call that an endpoint has refused, and that wait for a newer map.
  struct Misrouted {
    Call* call;
    std::uint32_t first_slot;
    std::uint32_t end_slot;
    std::uint32_t pauses;
  };
  struct Name {
    const Peer* peer;
    std::uint64_t sequence;
    std::uint8_t number;
    friend bool operator==(const Name&, const Name&) = default;
  };
  struct NameHash {
    std::size_t operator()(const Name& name) const noexcept {
      return std::hash<const void*>()(name.peer) ^ (name.sequence * 0x9e3779b97f4a7c15U) ^ name.number;
    }
  };

  // Whether the tick of a clock waits for the answer, and of which one.
  static bool precedes_tick(const Call& call) noexcept;
  static std::uint32_t read_clock(const Call& call) noexcept;
  // Whether servers keep it for the end of its clock.
  static bool is_applied_at_clock_end(const Call& call) noexcept;
  static void count_down(std::map<std::uint32_t, std::uint32_t>& counter, std::uint32_t clock);

  void begin(const CallPtr& call, Seconds now);
  void begin_again(Call& call, Seconds now);
  std::vector<std::unique_ptr<Part>> cut_slots(Call& call, std::uint32_t first, std::uint32_t end);
  Peer& peer_of(const Endpoint& endpoint);
  Peer* find_peer(const std::string& address) noexcept;
  std::vector<const Part*> listed(const Part& tick) const;

  void queue(std::unique_ptr<Part> part, Seconds now);
  Part& adopt(std::unique_ptr<Part> part);
  void pump(Peer& peer, Seconds now);
  void pump_all(Seconds now);
  bool may_tick(const Part& tick, const Peer& peer) const;
  void send(Part& part, Seconds now);
  void again(Part& part, Seconds due);
  void discharge(Part& part) noexcept;
  Seconds pause(std::uint32_t pauses) const;

  void answer(Part& part, const wire::Decoded& reply, std::size_t payload_bytes, Seconds now);
  void send_list(Part& part, Seconds now);
  void finish(Call& call, Seconds now);
  std::unique_ptr<Part> forget(Part& part, Seconds now);
  void hurry(const Part& tick, Seconds now);
  void refuse(Part& part, const wire::Decoded& reply, Seconds now);
  void retry(std::vector<Misrouted> refused, Seconds now, bool wait);
  bool stays(const Part& part) const;
  void spoil_open_writes();
  void settle(const CallPtr& call, Seconds now, std::optional<Failure> failure = {}, bool pumps = true);
  void follow_up(Seconds now);
  CallPtr shared(Call& call) { return call.shared_from_this(); }
  bool is_planted(Defect defect) const noexcept { return defect_ == defect; }

  const WorkerIdentity worker_;
  SlotMap map_;
  const Policy policy_;
  const bool atomic_clocks_;
  RequestCounts counts_;
  Timers timers_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::string, std::uint64_t> peer_ids_;    // by address
  std::unordered_map<Name, Part*, NameHash> parts_;  // sent, not answered
  std::map<std::uint64_t, CallPtr> calls_;           // begun, not settled, by the order in which they began
  std::map<std::uint64_t, Call*> open_;              // writes that are not settled, by sequence
  std::map<std::uint64_t, Call*> ticks_;             // not settled, by serial
  std::map<std::uint32_t, std::uint32_t>
      kept_;  // by clock: parts, not answered, of what servers keep for its end
  std::vector<Misrouted> refused_;
  HeldCalls held_;
  std::map<std::string, std::string> lost_;  // address -> why
  std::optional<Failure> closed_;
  std::optional<Failure> left_;
  std::deque<Outgoing> outgoing_;
  std::vector<CallPtr> settled_;
  std::set<std::uint32_t> ordered_;
  std::vector<Executed> order_;
  wire::Decoded decoded_;
  std::uint64_t write_ = 0;  // last sequences
  std::uint64_t read_ = (std::uint64_t{1} << 63U) - 1;
  std::uint64_t submitted_ = 0;
  std::uint64_t begun_ = 0;
  std::uint64_t sent_ = 0;
  bool follows_up_ = false;
  Defect defect_ = Defect::kNone;
};

}  // namespace shoal::client
