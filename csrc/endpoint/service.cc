//   message -> decode -> job, worker -> table -> slices of the arcs (slots that are elsewhere are reported)
//           -> checks and limits for all slices -> operations of the arcs, or DeferredReads -> its reply, and
//           the replies that it releases
//
// Scatter and gather. A message is decoded once, cut along the arcs, executed by each arc for its slice, at
// once or at the end of a clock, and answered by one reply, in whose memory the arcs have put their slices.
// Replies that a request releases for other peers leave together with its own.
//
// Arcs move between services as objects: take_arcs() of one, adopt() of another. What an adopted arc lacks of
// the orders that the other arcs have executed, or they of its orders, is completed when the order is
// repeated. Until then requests of workers that some arc does not know, and of tables that some arc does not
// have, are refused.

#include "endpoint/service.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/int64_pairs.h"
#include "base/units.h"
#include "endpoint/reads.h"
#include "endpoint/saves.h"
#include "endpoint/writes.h"
#include "replica/replay.h"
#include "wire/digest.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

Service::Service(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits)
    : state_(slots, limits) {
  // A clock is merged in one call, and a merge takes at most 2^32 - 1 hashes.
  SHOAL_CHECK(limits.pending_bytes <= 32 * GiB,
              "at most 32 GiB of pushes can wait for their clock, got a limit of " +
                  std::to_string(limits.pending_bytes) + " bytes");
  StateRoom room = state_.make_room(arcs.size());
  state_.arcs.serve(arcs);
  follow(std::move(room));
}

// --- in ---------------------------------------------------------------------------------------------------

template <class Serve>
void Service::receive(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                      MultipartMessage* received, std::uint64_t received_ns, const Serve& serve) noexcept {
  const wire::Fault fault =
      wire::decode(frames, {.payload_bytes = state_.limits.request_bytes, .replies = false}, decoded_);
  const bool is_timed = (decoded_.header.flags & wire::kTimed) != 0;
  RequestContext request{.peer = peer,
                         .header = decoded_.header,
                         .hashes = decoded_.hashes,
                         .floats = decoded_.floats(),
                         .counts = decoded_.counts,
                         .bytes = decoded_.values,
                         .numbers = decoded_.numbers,
                         .tables = decoded_.tables,
                         .digest = decoded_.digest,
                         .out = out,
                         .received = received,
                         .received_ns = is_timed ? received_ns : 0};
  request.changed = std::move(executed_.changed);
  request.changed.clear();
  ServiceMetrics& metrics = state_.metrics;
  ++metrics.messages;
  for (const wire::Frame frame : frames) {
    metrics.bytes_in += frame.size();
  }
  const std::size_t first_reply = out.replies().size();
  answer_with(request, [&]() -> Outcome {
    // Reserve room for the reply first: an executed request must not fail because its reply cannot be queued.
    auto& replies = out.replies();
    if (replies.size() == replies.capacity()) {
      replies.reserve(std::max<std::size_t>(16, 2 * replies.size()));
    }
    if (fault) {
      return Refusal{fault.status, std::string(fault.message())};
    }
    ++metrics.requests[static_cast<std::size_t>(request.header.op)];
    return serve(request);
  });
  executed_ = {.changed = std::move(request.changed), .status = request.status, .key_list = request.key_list};
  if (request.header.op != Op::kTick) {
    return advance(out);
  }
  advance(out, &request);  // the steps are part of its time
  if (out.replies().size() > first_reply) {
    out.replies()[first_reply].shard_ns = request.shard_ns;
  }
}

void Service::handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                     MultipartMessage* received, std::uint64_t received_ns) noexcept {
  receive(peer, frames, out, received, received_ns,
          [this](RequestContext& request) { return serve(request); });
}

void Service::turn_away(std::string_view peer, std::span<const wire::Frame> frames,
                        ReplyQueue& out) noexcept {
  receive(peer, frames, out, nullptr, 0,
          [](const RequestContext& /*request*/) -> Outcome { return Refusal{Status::kOverloaded}; });
}

std::optional<Outcome> Service::check_worker(RequestContext& request) {
  const Header& header = request.header;
  if (state_.arcs.arcs().empty() && header.epoch < state_.epoch) {
    return refuse_slots(request);
  }
  if (!state_.arcs.has_begun() || state_.arcs.arcs().empty()) {
    return Refusal{Status::kNotAdmitted};
  }
  const JobRequests* const job = header.job == kDefaultJob ? nullptr : state_.find_job(header.job);
  if (job == nullptr) {
    return Refusal{Status::kWrongJob};
  }
  const Status status = state_.arcs.admits(request.worker(), header.incarnation, job->arcs_agree);
  return status == Status::kOk ? std::nullopt : std::optional<Outcome>(Refusal{status});
}

Outcome Service::refuse_slots(RequestContext& request) {
  if (auto refusal = recall(request)) {
    return *std::move(refusal);
  }
  state_.arcs.cut(has_keys(request.header.op) ? request.hashes : std::span<const std::uint64_t>(),
                  state_.cut);
  if (state_.cut.refused.empty()) {
    return wrong_epoch();
  }
  return done(refused_slots(state_.cut, request.out));
}

std::optional<Refusal> Service::recall(RequestContext& request) {
  const Header& header = request.header;
  if ((header.flags & (wire::kKeep | wire::kDigest)) == 0) {
    return std::nullopt;
  }
  if ((header.flags & wire::kDigest) == 0) {
    if (!request.is_anonymous()) {
      state_.key_lists.insert(digest(request.hashes, header.job), request.hashes);
    }
    return std::nullopt;
  }
  const auto list = state_.key_lists.find(Digest::read(request.digest), header.count);
  ++(list ? state_.metrics.key_list_hits : state_.metrics.key_list_misses);
  if (!list) {
    return Refusal{Status::kUnknownKeyList};
  }
  request.hashes = *list;  // stays valid: messages are served one at a time
  request.key_list = *list;
  return std::nullopt;
}

Outcome Service::serve(RequestContext& request) {
  const Header& header = request.header;
  if (header.op == Op::kPing) {
    return Answer{};
  }
  if (header.op == Op::kReplicate) {
    return bad_request("this endpoint has no replicas");
  }
  if (request.is_anonymous()) {
    if (!is_read(header)) {
      return bad_request("a " + std::string(wire::name(header.op)) + " needs a worker: join the job first");
    }
  } else if (auto outcome = check_worker(request)) {
    return *std::move(outcome);
  }
  if (header.op == Op::kTick) {
    return tick(state_, request);
  }
  if (header.op == Op::kSaveBegin || header.op == Op::kSavePoll || header.op == Op::kSaveEnd) {
    return save(state_, request);
  }
  ServedTable* const table = state_.find_table(header.table);
  if (table == nullptr) {
    return Refusal{Status::kNoTable};
  }
  const bool is_of_the_map = header.op == Op::kReduce || header.op == Op::kSweep;
  if (is_of_the_map && !state_.has_newest_map(request)) {  // the map defines which slots the answer covers
    return wrong_epoch();
  }
  if (auto refusal = recall(request)) {
    return *std::move(refusal);
  }
  if (header.op == Op::kPull || header.op == Op::kPush) {
    state_.hot_keys.add(header.table, request.hashes);
  }
  return is_read(header) ? read(state_, request, *table) : write(state_, request, *table);
}

// --- completed clocks, and the reads that they release ----------------------------------------------------

void Service::advance(ReplyQueue& out, RequestContext* timed) noexcept {
  std::uint64_t failures = 0;
  const auto waits = [&](const JobState& job) {
    const JobRequests* const requests = state_.find_job(job.number);
    return requests != nullptr && !requests->deferred.empty() &&
           requests->deferred.next_clock() <= job.applied;
  };
  const auto in_rows = [&](const auto& work) { timed == nullptr ? work() : state_.in_rows(*timed, work); };
  for (bool moves = true; moves && failures == 0;) {
    // Before the next step: a read at this clock must not see it.
    for (const auto& job : state_.jobs) {
      DeferredReads& deferred = job->deferred;
      while (!deferred.empty() && state_.arcs.is_complete(job->number, deferred.next_clock())) {
        release(deferred.pop(), out);
      }
    }
    moves = state_.arcs.step(waits, failures, in_rows);
  }
  state_.metrics.failed_steps += failures;
}

void Service::release(DeferredReads::Read read, ReplyQueue& out) noexcept {
  RequestContext request{.peer = read.peer,
                         .header = read.header,
                         .hashes = read.hashes.as<std::uint64_t>(),
                         .bytes = read.parameters.bytes(),
                         .out = out,
                         .received_ns = read.received_ns};
  std::optional<ReleasedWrite> write;  // if it is one
  answer_with(request, [&]() -> Outcome {
    if (tracks_ && !is_read(request.header)) {
      // What its record takes comes first: what was executed must not be missing in the log.
      released_writes_.reserve(released_writes_.size() + 1);
      request.changed.reserve(state_.arcs.arcs().size());
      write = ReleasedWrite{.header = request.header,
                            .parameters = {request.bytes.begin(), request.bytes.end()},
                            .changed = {}};
    }
    return execute_released(request);
  });
  if (write && !request.changed.empty()) {
    write->changed = std::move(request.changed);
    write->status = request.status;
    released_writes_.push_back(std::move(*write));
  }
}

Outcome Service::execute_released(RequestContext& request) {
  const Header& header = request.header;
  if (header.op == Op::kSaveBegin) {
    return begin_save(state_, request);
  }
  ServedTable* const table = state_.find_table(header.table);
  if (table == nullptr) {
    return Refusal{Status::kNoTable};
  }
  cut_read(state_, header, request.hashes);
  if (!state_.cut.refused.empty()) {
    return done(refused_slots(state_.cut, request.out));
  }
  if ((header.op == Op::kReduce || header.op == Op::kSweep) && !state_.has_newest_map(request)) {
    return wrong_epoch();
  }
  return is_read(header) ? answer(state_, request, *table) : sweep(state_, request);
}

void Service::finish_scan(const Scan& scan) noexcept {
  RequestContext request{
      .peer = scan.peer, .header = scan.header, .out = released_, .received_ns = scan.received_ns};
  answer_with(request, [&] { return answer_scan(state_, scan, request); });
}

void Service::track_released(bool tracks) {
  tracks_ = tracks;
  if (!tracks) {
    released_writes_.clear();
  }
}

// --- out --------------------------------------------------------------------------------------------------

// The one place where an exception of a handler becomes a reply.
template <class Serve>
void Service::answer_with(RequestContext& request, const Serve& serve) noexcept {
  Status status = Status::kInternal;
  try {
    try {
      return respond(request, serve());
    } catch (const std::bad_alloc&) {
      return respond(request, Refusal{status, "the server has no memory left for this request"});
    } catch (const std::exception& error) {
      status = status_of(error);
      return respond(request, Refusal{status, error.what()});
    }
  } catch (const std::exception&) {
    // Not even the text has room.
  }
  try {
    send(request, {.status = status}, 1, {}, {});
  } catch (const std::exception&) {
    // The peer gets no reply, and asks again.
  }
}

void Service::refuse(RequestContext& request, Status status) noexcept {
  answer_with(request, [&] { return Outcome(Refusal{status}); });
}

void Service::respond(RequestContext& request, Outcome outcome) {
  if (auto* const answer = std::get_if<Answer>(&outcome); answer != nullptr) {
    return send(request, answer->header, answer->frames, std::move(answer->first), std::move(answer->second));
  }
  const auto& [status, text] = std::get<Refusal>(outcome);
  const bool has_text =
      status == Status::kBadRequest || status == Status::kInternal || status == Status::kResourceExhausted;
  if (!has_text) {
    return send(request, {.status = status}, 0, {}, {});
  }
  PooledBuffer block = request.out.acquire(text.size());
  std::ranges::copy(std::as_bytes(std::span(text)), block.bytes().begin());
  send(request, {.status = status, .count = static_cast<std::uint32_t>(text.size())}, 1, std::move(block),
       {});
}

void Service::send(RequestContext& request, Header header, std::size_t frames, PooledBuffer first,
                   PooledBuffer second) {
  const Header& of = request.header;
  Reply reply;
  reply.peer = request.peer;
  header.magic = wire::kMagic;
  header.version = wire::kVersion;
  // The caller's own bits are returned to it.
  header.flags = static_cast<std::uint16_t>((of.flags & 0xff00U) | header.flags | wire::kReply);
  header.op = of.op <= wire::kLastOp ? of.op : Op::kNone;
  header.table = of.table;
  header.worker = of.worker;
  header.incarnation = of.incarnation;
  header.sequence = of.sequence;
  header.clock = (header.flags & wire::kDated) != 0 ? header.clock : of.clock;
  header.job = of.job;
  header.epoch = state_.epoch;
  const std::array<wire::Frame, 2> payload{first.bytes(), second.bytes()};
  wire::encode(header, std::span(payload).first(frames), reply.header);
  reply.payload[0] = std::move(first);
  reply.payload[1] = std::move(second);
  reply.frames = frames;
  if (header.status == Status::kOk) {
    reply.received_ns = request.received_ns;
    reply.shard_ns = request.shard_ns;
  }
  request.out.add(std::move(reply));
  request.status = header.status;
  ++state_.metrics.replies;
  ++state_.metrics.statuses[static_cast<std::size_t>(header.status)];
  state_.metrics.bytes_out += sizeof(Header) + header.payload_bytes;
}

void Service::released(ReplyQueue& out) noexcept {
  auto& waiting = released_.replies();
  std::size_t taken = 0;
  try {
    for (; taken < waiting.size(); ++taken) {
      out.add(std::move(waiting[taken]));
    }
  } catch (const std::bad_alloc&) {
    // The others are moved next time.
  }
  waiting.erase(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(taken));
}

}  // namespace shoal
