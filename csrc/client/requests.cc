// Requests: calls, and what is sent.
//
// At-least-once messages, which the servers' windows of accepted sequences make exactly-once writes. A call
// is cut into parts, one message each, along the map's runs of slots (client/cutting.h). The owner of the
// sockets sends what take_outgoing() returns and passes in what arrives; the time is an argument everywhere.
//
//   submit -> queued --credit, window--> sent --answer-------------------------> done
//                                        |  ^--no answer, or refused for now: again, later
//                                        |--deferred: it arrived, the answer follows
//                                        '--wrong epoch: its refused slots wait for a newer map, queued again
//
// A call that comes after others (client/held_calls.h) is held until these have succeeded, and is cut then. A
// pull that follows a push is sent behind it, and is asked again if anything was sent again since, so that
// its rows include the push.
//
// A part is identified by (endpoint, sequence, part number), which every reply repeats. All parts of a write
// carry the sequence of their call, so that a slot takes each call once wherever and however often its part
// arrives. Reads and ticks may be repeated; each of their parts has its own sequence, from 2^63 up.
//
// A tick (I5) waits for the reads of its clock at its endpoint, since these, repeated later, could see too
// much, also for functions and sweeps of all rows, and while a slot of its clock is refused anywhere. Where
// clocks are atomic and there are several endpoints, it also waits until all have acknowledged the pushes of
// its clock and the tick before: an endpoint that has taken a tick proves that every endpoint has the pushes
// of its clock, so if this worker dies the clock can still end everywhere, and endpoints differ by one tick
// at most. A tick is not sent anywhere before the held calls of its clock have begun, and these are queued
// before it.

#include "client/requests.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "client/call_errors.h"
#include "client/cutting.h"
#include "client/encoding.h"

namespace shoal::client {

namespace {

bool is_write(const Call& call) noexcept {
  switch (call.op) {
    case wire::Op::kPush:
    case wire::Op::kAssign:
    case wire::Op::kErase:
    case wire::Op::kLoadBegin:
    case wire::Op::kLoadRows:
    case wire::Op::kLoadFilter:
    case wire::Op::kLoadEnd:
    case wire::Op::kSaveBegin:
    case wire::Op::kSaveEnd:
      return true;
    default: {
      const auto* const everywhere = std::get_if<OfAll>(&call.what);
      return everywhere != nullptr && everywhere->is_write;
    }
  }
}

std::uint64_t payload_bytes(const Call& call) noexcept {
  std::uint64_t bytes = 0;
  const auto add = [&](const Payload& payload) {
    for (std::size_t i = 0; i < payload.count; ++i) {
      bytes += payload.frames.at(i).bytes.size();
    }
  };
  if (const auto* const of_slot = std::get_if<OfSlot>(&call.what)) {
    add(of_slot->payload);
  } else if (const auto* const of_all = std::get_if<OfAll>(&call.what)) {
    add(of_all->payload);
  }
  return bytes;
}

void check(const Call& call, std::uint32_t slots) {
  const std::string op(wire::name(call.op));
  if (const Keyed* const keyed = call.keyed()) {
    SHOAL_CHECK(
        keyed->begins.size() == std::size_t{slots} + 1 && keyed->begins.back() == keyed->hashes.size(),
        "a " + op + " needs hashes, and begins of " + std::to_string(slots) + " slots");
    const std::size_t bytes = keyed->hashes.size() * keyed->width;
    SHOAL_CHECK(keyed->values.empty() || keyed->values.size() == bytes,
                "a " + op + " needs one row for each hash");
    SHOAL_CHECK(keyed->out.empty() || keyed->out.size() == bytes,
                "a " + op + " needs room for one row for each hash");
    SHOAL_CHECK(keyed->counts.empty() || keyed->counts.size() == keyed->hashes.size(),
                "a " + op + " needs one count for each hash");
    const auto zero = std::ranges::find(keyed->counts, 0U);
    SHOAL_CHECK(zero == keyed->counts.end(),
                "counts are at least 1: number " + std::to_string(zero - keyed->counts.begin()) + " is 0");
  } else if (const auto* const of_slot = std::get_if<OfSlot>(&call.what)) {
    SHOAL_CHECK(of_slot->slot < slots,
                "slot " + std::to_string(of_slot->slot) + " of " + std::to_string(slots));
  }
}

}  // namespace

Requests::Requests(const WorkerIdentity& worker, SlotMap map, const Policy& policy, bool atomic_clocks)
    : worker_(worker), map_(std::move(map)), policy_(policy), atomic_clocks_(atomic_clocks) {}

Requests::~Requests() = default;

bool Requests::precedes_tick(const Call& call) noexcept {
  const bool is_keyed_read = call.sequence == 0 && call.keyed() != nullptr && call.op != wire::Op::kPrefetch;
  return call.op == wire::Op::kReduce || call.op == wire::Op::kSweep || is_keyed_read;
}

// What is for a later clock precedes the tick of that one. What a cache fetches is for its own, however long
// it waits.
std::uint32_t Requests::read_clock(const Call& call) noexcept {
  const Keyed* const keyed = call.keyed();
  return call.clock + (keyed != nullptr && !keyed->is_dated ? keyed->ahead : 0);
}

bool Requests::is_applied_at_clock_end(const Call& call) noexcept {
  return call.sequence != 0 && (call.op == wire::Op::kPush || call.op == wire::Op::kSweep);
}

void Requests::count_down(std::map<std::uint32_t, std::uint32_t>& counter, std::uint32_t clock) {
  const auto found = counter.find(clock);
  if (--found->second == 0) {
    counter.erase(found);
  }
}

// --- calls -------------------------------------------------------------------------------------------------

CallPtr Requests::submit(wire::Op op, std::uint32_t table, std::uint32_t clock, Seconds now, Seconds deadline,
                         Operation what, Terms terms) {
  const auto call = std::make_shared<Call>(op, table, clock, now, deadline, std::move(what));
  check(*call, map_.slots());
  call->keep = std::move(terms.keep);
  call->serial = ++submitted_;
  call->repetitions = repetitions();
  if (terms.is_traced) {
    call->trace = std::make_unique<std::vector<PartTrace>>();
  }
  std::vector<Call*> pending;
  const Call* failed = nullptr;
  for (const CallPtr& other : terms.after) {
    if (!other->is_done()) {
      pending.push_back(other.get());
    } else if (other->failure.has_value() && failed == nullptr) {
      failed = other.get();
    }
  }
  if (failed != nullptr) {
    settle(call, now, dependency_failed(*call, *failed));
    return call;
  }
  if (!closed_.has_value()) {
    check_fits(*call, map_, policy_);
  }
  if (terms.follows != nullptr) {
    call->follows_ = terms.follows;
    // A filter may change a push on its way: the pull leaves when it has arrived.
    const bool is_filtered = terms.follows->keyed()->filter != nullptr;
    call->is_marked_ = !is_filtered;
    if (!terms.follows->is_done()) {
      terms.follows->pulls_.push_back(call.get());
      if (is_filtered && !is_planted(Defect::kLeavesBeforeAFilteredPush)) {
        pending.push_back(terms.follows.get());
      }
    }
  }
  if (pending.empty() || closed_.has_value()) {
    begin(call, now);
    return call;
  }
  held_.hold(call, std::move(pending));
  call->was_held = true;
  timers_.set(*call, call->deadline);
  return call;
}

CallPtr Requests::tick(std::uint32_t clock, std::vector<std::uint32_t> tables, Seconds now, Seconds deadline,
                       bool is_traced) {
  const auto call =
      std::make_shared<Call>(wire::Op::kTick, 0, clock, now, deadline, Ending{.tables = std::move(tables)});
  if (is_traced) {
    call->trace = std::make_unique<std::vector<PartTrace>>();
  }
  call->serial = ++submitted_;
  ticks_.emplace(call->serial, call.get());
  begin(call, now);
  return call;
}

CallPtr Requests::compose(wire::Op op, std::uint32_t table, std::uint32_t clock, Seconds now,
                          bool is_traced) {
  const auto call = std::make_shared<Call>(op, table, clock, now, kNever, Composed{});
  if (is_traced) {
    call->trace = std::make_unique<std::vector<PartTrace>>();
  }
  call->serial = ++submitted_;
  call->repetitions = repetitions();
  return call;
}

void Requests::begin(const CallPtr& call, Seconds now) {
  if (closed_.has_value()) {
    settle(call, now, closed_);
    return;
  }
  std::vector<std::unique_ptr<Part>> parts = cut_slots(*call, 0, map_.slots());
  for (const std::unique_ptr<Part>& part : parts) {
    const auto lost = lost_.find(part->peer->endpoint.address);
    if (lost != lost_.end()) {
      settle(call, now, server_lost(*part, lost->second, now));
      return;
    }
  }
  call->begun_ = ++begun_;
  if (parts.empty()) {
    finish(*call, now);
    return;
  }
  if (is_write(*call)) {
    call->sequence = ++write_;
    open_.emplace(call->sequence, call.get());
  }
  calls_.emplace(call->begun_, call);
  timers_.set(*call, call->deadline);
  for (std::unique_ptr<Part>& part : parts) {
    queue(std::move(part), now);
  }
}

// Asks again for the rows of a pull.
void Requests::begin_again(Call& call, Seconds now) {
  call.is_marked_ = false;
  call.included.reset();
  call.deadline = now + call.deadline - call.started;
  call.started = now;
  timers_.set(call, call.deadline);
  for (std::unique_ptr<Part>& part : cut_slots(call, 0, map_.slots())) {
    queue(std::move(part), now);
  }
}

std::vector<std::unique_ptr<Part>> Requests::cut_slots(Call& call, std::uint32_t first, std::uint32_t end) {
  std::vector<std::unique_ptr<Part>> parts;
  for (const Cut& run : cut(call, map_, policy_, first, end)) {
    parts.push_back(std::make_unique<Part>(call, peer_of(map_.endpoint(run.endpoint)), run.first_slot,
                                           run.end_slot, run.begin, run.end));
  }
  return parts;
}

Peer* Requests::find_peer(const std::string& address) noexcept {
  const auto found = std::ranges::find_if(
      peers_, [&](const std::unique_ptr<Peer>& peer) { return peer->endpoint.address == address; });
  return found == peers_.end() ? nullptr : found->get();
}

Peer& Requests::peer_of(const Endpoint& endpoint) {
  if (Peer* const found = find_peer(endpoint.address)) {
    return *found;
  }
  const std::uint64_t id = peer_ids_.try_emplace(endpoint.address, peer_ids_.size()).first->second;
  return *peers_.emplace_back(std::make_unique<Peer>(endpoint, id));
}

// The parts of pushes that a tick names: of its clock, at its endpoint, not acknowledged. At most kWindow
// pushes have such parts. Acknowledged ones have arrived.
std::vector<const Part*> Requests::listed(const Part& tick) const {
  std::vector<const Part*> parts;
  for (const auto& [sequence, push] : open_) {
    if (push->op == wire::Op::kPush && push->clock == tick.call->clock) {
      for (const std::unique_ptr<Part>& part : push->parts_) {
        if (part->peer == tick.peer) {
          parts.push_back(part.get());
        }
      }
    }
  }
  return parts;
}

// --- sending -----------------------------------------------------------------------------------------------

// Puts a new part into the queue of its endpoint, and sends what may be sent.
void Requests::queue(std::unique_ptr<Part> owned, Seconds now) {
  Part& part = adopt(std::move(owned));
  std::deque<Part*>& queue = part.peer->queue;
  auto place = queue.end();
  if (part.call->was_held) {  // its tick may be in the queue
    place = std::ranges::find_if(queue, [&](const Part* queued) {
      return queued->call->op == wire::Op::kTick && queued->call->clock >= part.call->clock;
    });
  }
  queue.insert(place, &part);
  part.is_queued = true;
  pump(*part.peer, now);
}

// Adds a new part to its call, under a unique name.
Part& Requests::adopt(std::unique_ptr<Part> owned) {
  Part& part = *owned;
  Call& call = *part.call;
  call.parts_.push_back(std::move(owned));
  if (call.sequence != 0) {
    part.sequence = call.sequence;
    auto number =
        std::ranges::find(call.next_number_, part.peer->id, &std::pair<std::uint64_t, std::uint8_t>::first);
    if (number == call.next_number_.end()) {
      number = call.next_number_.insert(number, {part.peer->id, 0});
    }
    part.number = number->second++;
    if (is_applied_at_clock_end(call)) {
      ++kept_[call.clock];
    }
  } else {
    part.sequence = ++read_;
  }
  if (precedes_tick(call)) {
    ++part.peer->reads[read_clock(call)];
  }
  part.bytes = 2 * sizeof(wire::Header) + part.rows() * row_bytes(call) + payload_bytes(call);
  return part;
}

// Sends from the front of an endpoint's queue while window and credit permit.
void Requests::pump(Peer& peer, Seconds now) {
  while (!peer.queue.empty() && !closed_.has_value()) {
    Part& part = *peer.queue.front();
    if (part.call->sequence != 0 && part.call->sequence - open_.begin()->first >= kWindow) {
      return;
    }
    if (part.call->op == wire::Op::kTick) {
      if (!may_tick(part, peer)) {
        return;
      }
    } else if (peer.bytes != 0 && peer.bytes + part.bytes > policy_.credit) {
      return;
    }
    peer.queue.pop_front();
    part.is_queued = false;
    send(part, now);
  }
}

void Requests::pump_all(Seconds now) {
  for (const std::unique_ptr<Peer>& peer : peers_) {
    pump(*peer, now);
  }
}

// I5.
bool Requests::may_tick(const Part& tick, const Peer& peer) const {
  if (is_planted(Defect::kTicksBeforeItsReads)) {
    return true;
  }
  const std::uint32_t clock = tick.call->clock;
  if (peer.reads.contains(clock) || held_.holds_of(clock) != 0 ||
      std::ranges::any_of(refused_, [&](const Misrouted& run) { return run.call->clock == clock; })) {
    return false;
  }
  if (!atomic_clocks_ || map_.owners().size() == 1) {
    return true;
  }
  return (!kept_.contains(clock) || is_planted(Defect::kTicksBeforeItsPushesAreEverywhere)) &&
         ticks_.begin()->second == tick.call;
}

bool Requests::waits_for_pushes(const Call& tick) const {
  return atomic_clocks_ && std::ranges::any_of(tick.parts_, [&](const std::unique_ptr<Part>& part) {
           return !part->has_message && !part->peer->reads.contains(tick.clock);
         });
}

void Requests::send(Part& part, Seconds now) {
  Call& call = *part.call;
  Peer& peer = *part.peer;
  if (is_planted(Defect::kResendsWithANewSequence) && part.has_message && call.op == wire::Op::kPush) {
    parts_.erase({part.peer, part.sequence, part.number});
    part.sequence = ++write_;
    part.has_message = false;
  }
  const bool is_first = !part.has_message;
  const bool is_tick = call.op == wire::Op::kTick;
  ++(is_first ? counts_.sent : counts_.resent);
  if (is_tick && is_first && part.pauses == 0) {  // while it waits for other calls, their deadlines apply
    call.deadline = now + call.deadline - call.started;
    call.started = now;
  }
  if (is_first || is_tick) {  // the parts that a tick names may have been cut again
    encode(part, worker_, map_, is_tick ? listed(part) : std::vector<const Part*>());
    part.has_message = true;
  }
  if (part.sent_number == 0) {
    part.sent_number = ++sent_;
  }
  parts_[{part.peer, part.sequence, part.number}] = &part;
  if (!part.is_charged) {
    part.is_charged = true;
    peer.bytes += part.bytes;
  }
  part.sent = now;
  peer.first_sent = peer.first_sent.value_or(now);
  const Seconds wait = policy_.resend_after * std::pow(policy_.backoff, part.tries) +
                       static_cast<double>(peer.bytes) / policy_.bytes_per_second;
  ++part.tries;
  again(part, now + std::min(wait, policy_.longest));
  if (call.trace != nullptr) {
    if (!part.trace.has_value()) {
      part.trace = call.trace->size();
      call.trace->push_back({.endpoint = peer.endpoint, .keys = part.rows(), .begun = now});
    } else {
      call.trace->at(*part.trace).events.emplace_back("resent", now);
    }
    PartTrace& trace = call.trace->at(*part.trace);
    trace.sent = now;
    trace.bytes += sizeof(wire::Header);
    for (std::size_t i = 0; i < part.encoded.payload.count; ++i) {
      trace.bytes += part.encoded.payload.frames.at(i).bytes.size();
    }
  }
  outgoing_.push_back({part.peer, part.header, part.encoded.payload});
}

void Requests::again(Part& part, Seconds due) { timers_.set(part, due); }

void Requests::discharge(Part& part) noexcept {
  if (part.is_charged) {
    part.is_charged = false;
    part.peer->bytes -= part.bytes;
  }
}

Seconds Requests::pause(std::uint32_t pauses) const {
  return std::min(policy_.pause * std::pow(policy_.backoff, std::min(pauses, 60U)), policy_.longest_pause);
}

Outgoing Requests::take_outgoing() {
  Outgoing first = std::move(outgoing_.front());
  outgoing_.pop_front();
  return first;
}

// --- times -------------------------------------------------------------------------------------------------

void Requests::on_time(Seconds now) {
  while (Timer* const due = timers_.take(now)) {
    if (!due->is_call) {
      Part& part = static_cast<Part&>(*due);
      if (!is_planted(Defect::kSendsOnce) || part.tries == 0) {
        send(part, now);
      }
      continue;
    }
    Call& call = static_cast<Call&>(*due);
    if (call.op == wire::Op::kTick && std::ranges::any_of(call.parts_, [](const std::unique_ptr<Part>& part) {
          return !part->has_message && part->pauses == 0;
        })) {
      call.deadline = now + call.deadline - call.started;
      call.started = now;
    }
    if (call.deadline > now) {
      timers_.set(call, call.deadline);
    } else if (held_.has(call)) {
      settle(shared(call), now, held_too_long(call, held_.blocker(call)));
    } else {
      std::vector<const Part*> parts;
      for (const std::unique_ptr<Part>& part : call.parts_) {
        parts.push_back(part.get());
      }
      settle(shared(call), now, deadline_passed(call, parts, map_.epoch(), now));
    }
  }
}

std::string Requests::verify() const {
  std::map<const Peer*, std::uint64_t> bytes;
  std::map<std::pair<const Peer*, std::uint32_t>, std::uint32_t> reads;
  std::map<std::uint32_t, std::uint32_t> kept;
  std::size_t misrouted = 0;
  for (const auto& [begun, call] : calls_) {
    if (call->is_done()) {
      return "a call that is settled is pending";
    }
    if (call->place == Timer::kUnset) {
      return "I6: a call has no time";
    }
    misrouted += call->misrouted_;
    for (const std::unique_ptr<Part>& part : call->parts_) {
      bytes[part->peer] += part->is_charged ? part->bytes : 0;
      if (precedes_tick(*call)) {
        ++reads[{part->peer, read_clock(*call)}];
      }
      if (is_applied_at_clock_end(*call)) {
        ++kept[call->clock];
      }
      const auto found = parts_.find({part->peer, part->sequence, part->number});
      const bool is_sent = found != parts_.end() && found->second == part.get();
      if (part->is_queued == (is_sent || part->place != Timer::kUnset)) {
        return "I6: a part is neither queued nor has a time, or both";
      }
      if (is_sent && call->sequence != 0 && call->sequence - open_.begin()->first >= kWindow) {
        return "I1: a write is too far above the lowest unsettled one";
      }
      if (is_sent && call->op == wire::Op::kTick && part->pauses == 0 && part->tries == 1 &&
          held_.holds_of(call->clock) != 0) {
        return "I5: a tick was sent before held calls of its clock";
      }
    }
  }
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer->bytes != bytes[peer.get()]) {
      return "I2: the bytes in flight are not those of the parts";
    }
    for (const auto& [clock, count] : peer->reads) {
      if (reads[{peer.get(), clock}] != count) {
        return "I5: the reads of a clock are miscounted";
      }
    }
  }
  if (kept != kept_) {
    return "I5: what servers keep is miscounted";
  }
  return misrouted == refused_.size() ? "" : "the runs that wait for a map are miscounted";
}

}  // namespace shoal::client
