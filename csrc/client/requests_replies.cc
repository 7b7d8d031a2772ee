// Requests: what arrives, changes of the map, and how calls end.

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "client/call_errors.h"
#include "client/encoding.h"
#include "client/requests.h"

namespace shoal::client {

namespace {

constexpr std::uint32_t kMaxBadRequests =
    4;  // a refusal as bad may be due to damage on the way: the request is sent again as often

bool is_refused_for_now(wire::Status status) noexcept {
  return status == wire::Status::kRetry || status == wire::Status::kOverloaded ||
         status == wire::Status::kNotAdmitted;
}

}  // namespace

bool Requests::receive(const std::string& address, std::span<const wire::Frame> frames, Seconds now) {
  const std::optional<wire::Header> name = wire::peek(frames);
  Peer* const peer = find_peer(address);
  Part* part = nullptr;
  if (name.has_value() && peer != nullptr) {
    const auto found = parts_.find({peer, name->sequence, name->part()});
    part = found == parts_.end() ? nullptr : found->second;
  }
  // A wrong answer may be decoded to the room of the rows too; the right one settles the part, and comes
  // last.
  const wire::Limits limits{.payload_bytes = kMaxReplyBytes, .replies = true};
  const wire::Fault fault =
      wire::decode(frames, limits, decoded_, part == nullptr ? std::span<std::byte>() : answer_room(*part));
  if (fault) {
    ++counts_.garbled;
    if (part == nullptr || fault.status != wire::Status::kWrongVersion) {
      return false;
    }
    settle(shared(*part->call), now, wrong_answer(*part, fault.message()));
    return true;
  }
  const wire::Header& reply = decoded_.header;
  if (is_planted(Defect::kTakesAnyAnswer) && reply.status == wire::Status::kOk &&
      reply.op != wire::Op::kPull) {
    Part* first = nullptr;
    for (const auto& [key, other] : parts_) {
      if (other->peer == peer && other->call->op == reply.op &&
          (first == nullptr || other->sent_number < first->sent_number)) {
        first = other;
      }
    }
    if (first != nullptr) {
      const CallPtr call = shared(*first->call);
      forget(*first, now);
      finish(*call, now);
      return true;
    }
  }
  if (part == nullptr || reply.op != part->call->op || reply.worker != worker_.rank ||
      reply.incarnation != worker_.incarnation || reply.job != worker_.job) {
    ++counts_.strays;
    return true;
  }
  const CallPtr call = shared(*part->call);  // kept until the end of this function
  peer->last_reply = now;
  discharge(*part);
  const wire::Status status = part->last = reply.status;
  if (part->trace.has_value() && status != wire::Status::kOk) {
    call->trace->at(*part->trace).events.emplace_back(wire::name(status), now);
  }
  if (part->encoded.digest.has_value() &&
      (status == wire::Status::kOk || status == wire::Status::kDeferred)) {
    peer->lists.add(*part->encoded.digest);
  }
  std::size_t bytes = 0;
  for (const wire::Frame frame : frames.subspan(1)) {
    bytes += frame.size();
  }
  if (status == wire::Status::kOk && call->op == wire::Op::kStats && reply.epoch > map_.epoch()) {
    refuse(*part, decoded_, now);  // of the slots that the endpoint has by a newer map, perhaps fewer
  } else if (status == wire::Status::kOk) {
    ++counts_.answers;
    answer(*part, decoded_, bytes, now);
  } else if (status == wire::Status::kDeferred) {
    ++counts_.deferred;
    const Seconds wait = policy_.deferred_after * std::pow(policy_.backoff, std::min(part->pauses, 60U));
    ++part->pauses;
    part->tries = 0;
    again(*part, now + std::min(wait, policy_.longest));
  } else if (is_planted(Defect::kTakesEarlyForDone) && status == wire::Status::kRetry) {
    forget(*part, now);
    finish(*call, now);
  } else if (is_refused_for_now(status) ||
             (status == wire::Status::kBadRequest && part->doubts < kMaxBadRequests)) {
    ++(status == wire::Status::kRetry        ? counts_.retry
       : status == wire::Status::kOverloaded ? counts_.overloaded
       : status == wire::Status::kBadRequest ? counts_.bad_request
                                             : counts_.not_admitted);
    again(*part, now + pause(part->pauses));
    ++part->pauses;
    part->doubts += status == wire::Status::kBadRequest ? 1 : 0;
    part->tries = 0;
    if (status == wire::Status::kRetry) {
      hurry(*part, now);
    }
  } else if (status == wire::Status::kWrongEpoch) {
    refuse(*part, decoded_, now);
  } else if (status == wire::Status::kUnknownKeyList && part->is_filtered) {
    send_list(*part, now);
  } else if (status == wire::Status::kFenced) {
    close({ErrorKind::kFenced, "worker " + std::to_string(worker_.rank) + " (incarnation " +
                                   std::to_string(worker_.incarnation) +
                                   ") was declared dead and replaced: " + peer->endpoint.label() +
                                   " refused the " + call->name() + "; end this process, or connect again"},
          now);
  } else {
    settle(call, now, refusal(*part, decoded_.text));
  }
  pump(*peer, now);
  return true;
}

// Sends a part with its key list, which the endpoint turned out not to have.
void Requests::send_list(Part& part, Seconds now) {
  EncodedPayload& sent = part.encoded;
  if (!sent.keep && sent.digest.has_value()) {
    const Keyed& keyed = *part.call->keyed();
    const auto hashes = std::as_bytes(keyed.hashes.subspan(part.begin, part.rows()));
    keyed.filter->lost(hashes.size());
    part.peer->lists.remove(*sent.digest);
    sent.payload.frames[0] = {.bytes = hashes, .owner = part.call->keep};
    sent.keep = true;
    part.has_message = false;
    ++counts_.resent;  // in the order of repetitions: what came after it may have been executed
  }
  send(part, now);
}

void Requests::answer(Part& part, const wire::Decoded& reply, std::size_t payload_bytes, Seconds now) {
  const CallPtr call = shared(*part.call);
  if (part.trace.has_value()) {
    PartTrace& trace = call->trace->at(*part.trace);
    trace.is_answered = true;
    trace.received_bytes = sizeof(wire::Header) + payload_bytes;
    if ((reply.header.flags & wire::kTimed) != 0) {
      trace.times = wire::unpack_times(reply.header.aux);
    }
  }
  constexpr std::string_view kRemedy = ": install one version of shoal on all machines";
  const std::string wrong = store_answer(part, reply, payload_bytes);
  if (!wrong.empty()) {
    settle(call, now, wrong_answer(part, wrong, kRemedy));
    return;
  }
  const bool is_push = call->op == wire::Op::kPush;
  if ((is_push || call->op == wire::Op::kPull) && ordered_.contains(call->table)) {
    order_.push_back({.serial = call->serial,
                      .table = call->table,
                      .first_slot = part.first_slot,
                      .end_slot = part.end_slot,
                      .position = reply.header.aux,
                      .is_push = is_push});
  }
  const std::unique_ptr<Part> done = forget(part, now);
  if (call->parts_.empty() && call->misrouted_ == 0 && call->is_everywhere()) {
    const std::string misfit = put_in_slot_order(*call, map_);
    if (!misfit.empty()) {
      settle(call, now, wrong_answer(*done, misfit, kRemedy));
      return;
    }
    const auto* const everywhere = std::get_if<OfAll>(&call->what);
    if (everywhere != nullptr && everywhere->is_user_function) {
      if (std::optional<Failure> failure = user_failure(call->answers)) {
        settle(call, now, std::move(failure));
        return;
      }
    }
  }
  finish(*call, now);
}

// Settles a call if all of it has been answered.
void Requests::finish(Call& call, Seconds now) {
  if (is_planted(Defect::kDoneByTheFirstPart) && !call.is_done()) {
    settle(shared(call), now);
    return;
  }
  if (call.is_done() || !call.parts_.empty() || call.misrouted_ != 0) {
    return;
  }
  if (call.follows_ != nullptr) {
    const Call& push = *call.follows_;
    if (!push.is_done()) {
      return;
    }
    if (push.failure.has_value()) {
      settle(shared(call), now, push.failure);
      return;
    }
    // A push that was held may have left later than the pull.
    const bool may_lack_it = push.repetitions != repetitions() || call.begun_ < push.begun_;
    if (call.is_marked_ && may_lack_it && !is_planted(Defect::kTakesRowsBehindARepeatedPush)) {
      begin_again(call, now);
      return;
    }
  }
  settle(shared(call), now);
}

// Takes a part out of its call. The part is returned, so that it outlives what uses it.
std::unique_ptr<Part> Requests::forget(Part& part, Seconds now) {
  Call& call = *part.call;
  discharge(part);
  const auto sent = parts_.find({part.peer, part.sequence, part.number});
  if (sent != parts_.end() && sent->second == &part) {
    parts_.erase(sent);
  }
  timers_.unset(part);
  if (part.is_queued) {
    part.is_queued = false;
    std::erase(part.peer->queue, &part);
  }
  if (precedes_tick(call)) {
    count_down(part.peer->reads, read_clock(call));
  }
  if (is_applied_at_clock_end(call)) {
    count_down(kept_, call.clock);
  }
  if (part.trace.has_value()) {
    call.trace->at(*part.trace).ended = now;
  }
  const auto owner = std::ranges::find_if(
      call.parts_, [&](const std::unique_ptr<Part>& other) { return other.get() == &part; });
  std::unique_ptr<Part> taken = std::move(*owner);
  call.parts_.erase(owner);
  return taken;
}

// Sends again at once the pushes that a tick found missing: sent before it, and not answered.
void Requests::hurry(const Part& tick, Seconds now) {
  for (const Part* const listed_part : listed(tick)) {
    if (listed_part->is_charged && listed_part->sent < tick.sent) {
      Part& part = *parts_.at({listed_part->peer, listed_part->sequence, listed_part->number});
      part.tries = 0;
      send(part, now);
    }
  }
}

// --- maps --------------------------------------------------------------------------------------------------

// Stores the slots that an endpoint refused; the rest of a write is done, a read is repeated as a whole.
void Requests::refuse(Part& refused_part, const wire::Decoded& reply, Seconds now) {
  const CallPtr call = shared(*refused_part.call);
  const std::unique_ptr<Part> part = forget(refused_part, now);
  if (is_planted(Defect::kForgetsRefusedSlots)) {
    finish(*call, now);
    return;
  }
  std::vector<std::uint32_t> slots;
  for (const std::uint16_t slot : reply.slots) {
    if (slot >= part->first_slot && slot < part->end_slot) {
      slots.push_back(slot);
    }
  }
  std::ranges::sort(slots);
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  std::vector<Misrouted> runs{{call.get(), part->first_slot, part->end_slot, part->pauses}};
  const Keyed* const keyed = call->keyed();
  if (call->sequence != 0 && keyed != nullptr && !slots.empty()) {
    std::size_t rows = 0;
    for (const std::uint32_t slot : slots) {
      rows += keyed->begins[slot + std::size_t{1}] - keyed->begins[slot];
    }
    // A part that is refused as a whole is not split: a pending tick names it by slots of it.
    if (rows < part->rows()) {
      runs.clear();
      for (const std::uint32_t slot : slots) {
        if (!runs.empty() && runs.back().end_slot == slot) {
          ++runs.back().end_slot;
        } else {
          runs.push_back({call.get(), slot, slot + 1, part->pauses});
        }
      }
    }
    call->total += call->op == wire::Op::kErase ? reply.header.aux : 0;
  }
  counts_.refused += slots.size();
  call->misrouted_ += static_cast<std::uint32_t>(runs.size());
  if (reply.header.epoch < map_.epoch()) {
    retry(std::move(runs), now, true);  // the endpoint has an older map
  } else {
    refused_.insert(refused_.end(), runs.begin(), runs.end());
  }
}

// Cuts refused slots again, in the order of submission; sends after a pause if the map is unchanged.
void Requests::retry(std::vector<Misrouted> refused, Seconds now, bool wait) {
  std::ranges::stable_sort(refused, {}, [](const Misrouted& run) { return run.call->serial; });
  std::vector<CallPtr> calls;
  for (const Misrouted& run : refused) {
    calls.push_back(shared(*run.call));
  }
  for (const Misrouted& run : refused) {
    Call& call = *run.call;
    if (call.is_done()) {
      continue;
    }
    --call.misrouted_;
    std::vector<std::string> have_it;
    if (call.is_everywhere()) {
      for (const std::unique_ptr<Part>& part : call.parts_) {
        have_it.push_back(part->peer->endpoint.address);
      }
      for (const Answer& answer : call.answers) {
        have_it.push_back(answer.address);
      }
    }
    for (std::unique_ptr<Part>& part : cut_slots(call, run.first_slot, run.end_slot)) {
      const std::string& address = part->peer->endpoint.address;
      if (std::ranges::find(have_it, address) != have_it.end()) {
        continue;
      }
      const auto lost = lost_.find(address);
      if (lost != lost_.end()) {
        settle(shared(call), now, server_lost(*part, lost->second, now));
        break;
      }
      if (wait) {
        part->pauses = run.pauses + 1;
        Part& adopted = adopt(std::move(part));
        again(adopted, now + pause(run.pauses));
      } else {
        queue(std::move(part), now);
      }
    }
    finish(call, now);
  }
}

void Requests::set_map(SlotMap map, Seconds now) {
  if (closed_.has_value()) {
    return;
  }
  SHOAL_CHECK(map.slots() == map_.slots(), "the map of epoch " + std::to_string(map.epoch()) + " has " +
                                               std::to_string(map.slots()) + " slots, the store has " +
                                               std::to_string(map_.slots()));
  std::vector<Misrouted> refused = std::exchange(refused_, {});
  if (map.epoch() <= map_.epoch() || is_planted(Defect::kKeepsItsOldMap)) {
    retry(std::move(refused), now, true);
    return;
  }
  map_ = std::move(map);
  spoil_open_writes();
  for (const auto& [begun, call] : calls_) {
    const bool everywhere = call->is_everywhere();
    std::vector<Part*> moved;
    for (const std::unique_ptr<Part>& part : call->parts_) {
      if (everywhere || !stays(*part)) {
        moved.push_back(part.get());
      }
    }
    if (everywhere) {
      std::erase_if(refused,
                    [moved_call = call.get()](const Misrouted& run) { return run.call == moved_call; });
      refused.push_back({call.get(), 0, map_.slots(), 0});
      call->misrouted_ = 1;
      call->answers.clear();
    } else {
      for (const Part* const part : moved) {
        refused.push_back({call.get(), part->first_slot, part->end_slot, 0});
      }
      call->misrouted_ += static_cast<std::uint32_t>(moved.size());
    }
    counts_.moved += moved.size();
    for (Part* const part : moved) {
      forget(*part, now);
    }
  }
  std::erase_if(outgoing_,
                [&](const Outgoing& message) { return !map_.has(message.peer->endpoint.address); });
  std::erase_if(peers_, [&](const std::unique_ptr<Peer>& peer) { return !map_.has(peer->endpoint.address); });
  lost_.clear();  // a newer map is of living endpoints
  retry(std::move(refused), now, false);
  pump_all(now);
}

// Does what is planted of the calls that a newer map may cut again.
void Requests::spoil_open_writes() {
  if (defect_ == Defect::kNone) {
    return;
  }
  for (const auto& [sequence, call] : std::map(open_)) {
    const bool is_push = call->op == wire::Op::kPush;
    if (is_planted(Defect::kLosesCounts) && is_push) {
      std::get<Keyed>(call->what).counts = {};
    }
    if ((is_planted(Defect::kRenumbersPushes) && is_push) ||
        (is_planted(Defect::kRenumbersOtherWrites) && !is_push)) {
      open_.erase(sequence);
      call->sequence = ++write_;
      open_.emplace(call->sequence, call);
    }
  }
}

bool Requests::stays(const Part& part) const {
  const Run& run = map_.runs()[map_.run_of(part.first_slot)];
  return part.has_message && map_.endpoint(run.endpoint).address == part.peer->endpoint.address &&
         part.end_slot <= run.end_slot;
}

// --- endings -----------------------------------------------------------------------------------------------

void Requests::lose(std::uint32_t server, const std::string& reason, Seconds now) {
  for (const Endpoint& endpoint : map_.endpoints()) {
    if (endpoint.server == server) {
      lost_[endpoint.address] = reason;
    }
  }
  std::vector<CallPtr> calls;
  for (const auto& [begun, call] : calls_) {
    calls.push_back(call);
  }
  for (const CallPtr& call : calls) {
    const auto part = std::ranges::find_if(call->parts_, [&](const std::unique_ptr<Part>& candidate) {
      return lost_.contains(candidate->peer->endpoint.address);
    });
    if (part != call->parts_.end()) {
      // Nothing is sent until all have failed: a tick would leave as soon as its pushes have.
      settle(call, now, server_lost(**part, lost_.at((*part)->peer->endpoint.address), now), false);
    }
  }
  pump_all(now);
}

void Requests::close(Failure failure, Seconds now) {
  if (!closed_.has_value()) {
    closed_ = std::move(failure);
  }
  std::vector<CallPtr> calls = held_.calls();
  for (const auto& [begun, call] : calls_) {
    calls.push_back(call);
  }
  for (const CallPtr& call : calls) {
    settle(call, now, closed_);
  }
}

void Requests::reconnected(const std::string& address, const std::string& reason, Seconds now) {
  Peer* const peer = find_peer(address);
  if (peer == nullptr) {
    return;
  }
  ++counts_.reconnected;
  ++peer->ends;
  peer->ended = reason;
  std::erase_if(outgoing_, [&](const Outgoing& message) { return message.peer == peer; });
  // Parts refused for now keep their pause. Answers to deferred parts would go to the former connection.
  std::vector<Part*> lost;
  for (const auto& [name, part] : parts_) {
    if (part->peer == peer && (part->is_charged || part->last == wire::Status::kDeferred)) {
      lost.push_back(part);
    }
  }
  std::ranges::sort(lost, {},
                    [](const Part* part) { return std::pair(part->call->serial, part->sent_number); });
  for (Part* const part : lost) {
    part->tries = 0;
    send(*part, now);
  }
}

void Requests::settle(const CallPtr& call, Seconds now, std::optional<Failure> failure, bool pumps) {
  if (call->is_done()) {
    return;
  }
  call->failure = failure.has_value() && left_.has_value() ? left_ : std::move(failure);
  call->settled_at = now;
  const bool has_failed = call->failure.has_value();
  if (has_failed) {
    call->answers.clear();
  }
  calls_.erase(call->begun_);
  timers_.unset(*call);
  if (held_.has(*call)) {
    held_.release(*call);
  }
  while (!call->parts_.empty()) {
    forget(*call->parts_.front(), now);
  }
  if (call->misrouted_ != 0) {
    std::erase_if(refused_, [&](const Misrouted& run) { return run.call == call.get(); });
    call->misrouted_ = 0;
  }
  if (call->follows_ != nullptr) {
    std::erase(call->follows_->pulls_, call.get());
    call->follows_.reset();
  }
  // The arrays are released, even if the call itself is still referenced.
  if (Keyed* const keyed = std::get_if<Keyed>(&call->what)) {
    keyed->hashes = {};
    keyed->begins = {};
    keyed->values = {};
    keyed->counts = {};
  } else if (OfSlot* const of_slot = std::get_if<OfSlot>(&call->what)) {
    of_slot->payload = {};
  } else if (OfAll* const of_all = std::get_if<OfAll>(&call->what)) {
    of_all->payload = {};
  }
  call->keep.reset();
  if (call->sequence != 0) {
    open_.erase(call->sequence);
  }
  ticks_.erase(call->serial);
  call->done_.store(true, std::memory_order_release);
  settled_.push_back(call);
  if (call->op == wire::Op::kTick && has_failed) {
    close(*call->failure, now);  // the clock cannot end: later pushes would have no effect
  }
  held_.settled(*call);
  for (Call* const pull : std::exchange(call->pulls_, {})) {
    if (!held_.has(*pull)) {
      finish(*pull, now);
    }
  }
  follow_up(now);
  if (pumps) {
    pump_all(now);
  }
}

// Begins or fails the held calls that are due, and those that are due then: not one within the other.
void Requests::follow_up(Seconds now) {
  if (follows_up_) {
    return;
  }
  follows_up_ = true;
  while (const auto due = held_.take_due()) {
    const auto& [call, failed] = *due;
    if (failed == nullptr) {
      held_.release(*call);
      begin(call, now);
    } else if (failed == call->follows_.get()) {
      settle(call, now, failed->failure);
    } else {
      settle(call, now, dependency_failed(*call, *failed));
    }
  }
  follows_up_ = false;
}

}  // namespace shoal::client
