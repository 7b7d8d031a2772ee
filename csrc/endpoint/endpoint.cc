//   request -> Service -> records -> next_message() -> stream's socket -> Endpoint of the backup -> Follower
//           -> reply, held <- commit <- handle_backup() <- stream's socket <- acknowledgement
//
// What an endpoint has to do is declared by the scheduler: assign() names the arcs that it serves and the
// streams that it sends and receives. A backup refuses the records of a stream that its own assignment does
// not list.

#include "endpoint/endpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/check.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

// The op of a message that was not checked yet.
Op op_of(std::span<const wire::Frame> frames) noexcept {
  const bool has_header = !frames.empty() && frames[0].size() == sizeof(Header);
  return has_header ? Op{std::to_integer<std::uint8_t>(frames[0][offsetof(Header, op)])} : Op::kNone;
}

// Whether requests of this op change arcs. Those of LOAD_* do, but no stream outlives them.
bool may_change(Op op) noexcept {
  switch (op) {
    case Op::kPush:
    case Op::kTick:
    case Op::kAssign:
    case Op::kErase:
    case Op::kReduce:
    case Op::kSweep:
    case Op::kSaveBegin:
    case Op::kSaveEnd:
      return true;
    default:
      return false;
  }
}

// Frames with memory of their own.
struct OwnFrames {
  std::vector<std::vector<std::byte>> frames;
};

std::vector<SharedFrame> copy_of(std::span<const wire::Frame> frames) {
  auto own = std::make_shared<OwnFrames>();
  for (const wire::Frame frame : frames) {
    own->frames.emplace_back(frame.begin(), frame.end());
  }
  std::vector<SharedFrame> shared;
  for (const auto& frame : own->frames) {
    shared.push_back({.bytes = frame, .owner = own});
  }
  return shared;
}

// The frames of a message, whose bytes stay when the service takes them.
std::vector<SharedFrame> share(std::span<const wire::Frame> frames, MultipartMessage* received) {
  if (received == nullptr) {
    return copy_of(frames);
  }
  const auto owner = received->share();
  std::vector<SharedFrame> shared;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    shared.push_back({.bytes = owner->frame(i + 1), .owner = owner});  // the first one is the peer
  }
  return shared;
}

// A reply to a REPLICATE of a stream.
void queue_acknowledgement(ReplyQueue& out, StreamId stream, const Acknowledgement& given) {
  Reply reply;
  reply.peer = given.peer;
  Header header = wire::RecordReply{.stream = stream,
                                    .position = given.position,
                                    .status = given.status,
                                    .arrived = given.status == Status::kOk ? given.arrived : 0}
                      .header();
  if (given.status == Status::kInternal) {
    header.count = static_cast<std::uint32_t>(given.text.size());
    reply.payload[0] = out.acquire(given.text.size());
    std::ranges::copy(std::as_bytes(std::span(given.text)), reply.payload[0].bytes().begin());
    reply.frames = 1;
  }
  const std::array<wire::Frame, 1> payload{reply.payload[0].bytes()};
  wire::encode(header, std::span(payload).first(reply.frames), reply.header);
  out.add(std::move(reply));
}

}  // namespace

Endpoint::Endpoint(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits)
    : slots_(slots), limits_(limits), service_(slots, arcs, limits), scans_([this](Scan& scan) {
        const Turn turn(*this);
        service_.finish_scan(scan);
        wake();
      }) {
  service_.set_save_filter([this] {
    mutex_.assert_held();
    return admit_save();
  });
  service_.set_scans(&scans_);
}

// --- turns ------------------------------------------------------------------------------------------------

void Endpoint::end_turn() const {
  if (service_.has_session()) {
    session_begun_.notify_one();
  }
  mutex_.unlock();
  // A question that was asked before this is seen; a later one finds the mutex free, or who has it.
  while (has_questions_.load() && mutex_.try_lock()) {
    answer_questions();
    mutex_.unlock();
  }
}

void Endpoint::answer_questions() const noexcept {
  const MutexLock lock(questions_mutex_);
  for (Question* const question : questions_) {
    try {
      if (!question->is_answered) {
        question->ask();
      }
    } catch (const std::exception&) {
      // No memory for the answer: there is none.
    }
    question->is_answered = true;
    question->answered.notify_one();
  }
  has_questions_.store(false);
}

// --- orders -----------------------------------------------------------------------------------------------

void Endpoint::set_waker(std::function<void()> waker) {
  const Turn turn(*this);
  waker_ = std::move(waker);
}

void Endpoint::set_clock(NanosecondClock clock) {
  const Turn turn(*this);
  service_.set_clock(clock);
}

void Endpoint::wake() {
  if (waker_) {
    waker_();
  }
}

ArcResult Endpoint::apply(const Order& order) {
  if (const auto* const table = std::get_if<AddTable>(&order); table != nullptr) {
    add_table(*table);
    return {};
  }
  const Turn turn(*this);
  const Order resolved = service_.resolved(order);
  ArcResult result = service_.apply(resolved);
  log(resolved);
  return result;
}

// Shards are made without the mutex, which would delay requests: the table's first request comes after the
// order was reported done.
void Endpoint::add_table(const AddTable& order) {
  for (bool is_everywhere = false; !is_everywhere;) {
    ArcGroup::ShardMakers makers;
    {
      const Turn turn(*this);
      makers = service_.lacking(order.id, order.spec);
    }
    std::vector<std::pair<std::size_t, std::shared_ptr<Shard>>> shards;
    for (const auto& [first_slot, make] : makers) {
      shards.emplace_back(first_slot, make(order.spec));
    }
    const Turn turn(*this);
    is_everywhere = service_.add_shards(order.id, order.spec, shards);
    if (is_everywhere) {
      log(order);
    }
  }
}

void Endpoint::log(const Order& order) {
  if (log_.has_streams()) {
    try {
      append_order(order);
      append_released();
    } catch (const std::bad_alloc&) {
      log_.stop("there was no memory to log an order");
    }
    wake();
  } else if (service_.has_released()) {
    wake();
  }
}

void Endpoint::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  const Turn turn(*this);
  service_.set_map(epoch, ranges);
  if (service_.has_released()) {
    wake();
  }
}

std::vector<std::uint32_t> Endpoint::tables() const {
  const Turn turn(*this);
  return service_.tables();
}

std::unique_ptr<Shard> Endpoint::snapshot(std::uint32_t id) const {
  const Turn turn(*this);
  return service_.snapshot(id);
}

std::vector<std::vector<std::byte>> Endpoint::save_arc(const SlotRange& range) const {
  const Turn turn(*this);
  return service_.save_arc(range);
}

std::shared_ptr<CheckpointSession> Endpoint::next_session(std::optional<std::chrono::milliseconds> patience) {
  const Turn turn(*this);
  const auto end = std::chrono::steady_clock::now() + patience.value_or(std::chrono::milliseconds(0));
  while (!service_.has_closed_saves() && !service_.has_session()) {
    if (!patience) {
      session_begun_.wait(mutex_);
    } else if (std::chrono::steady_clock::now() < end) {
      session_begun_.wait_until(mutex_, end);
    } else {
      break;
    }
  }
  return service_.take_session();
}

void Endpoint::close_sessions() {
  const Turn turn(*this);
  service_.close_saves();
  session_begun_.notify_all();
}

// --- the log ----------------------------------------------------------------------------------------------

void Endpoint::append_order(const Order& order, std::optional<StreamId> stream) {
  auto bytes = std::make_shared<const std::vector<std::byte>>(encode(order));
  LogRecord record{.kind = wire::Record::kOrder, .count = 1};
  record.frames[0] = {.bytes = *bytes, .owner = bytes};
  log_.append(std::move(record), {}, [](const auto&) { return 0U; }, stream);
}

void Endpoint::append_request(std::span<const wire::Frame> frames, std::span<const SharedFrame> shared,
                              const ChangedArcs& changed, Status status,
                              std::span<const std::uint64_t> key_list) {
  LogRecord record{.kind = wire::Record::kRequest,
                   .status = status,
                   .end_slot = static_cast<std::uint32_t>(changed.back().end),
                   .count = shared.size()};
  std::ranges::copy(shared, record.frames.begin());
  const Header header = wire::peek(frames).value_or(Header{});
  if ((header.flags & wire::kDigest) != 0) {
    // The follower has no key lists: it gets the list that the digest named.
    Header named = header;
    named.flags &= static_cast<std::uint16_t>(~wire::kDigest);
    record.frames[1] = copy_of(std::array{std::as_bytes(key_list)}).front();
    std::array<wire::Frame, wire::kMaxFrames> payload;
    for (std::size_t i = 1; i < record.count; ++i) {
      payload.at(i - 1) = record.frames.at(i).bytes;
    }
    std::array<std::byte, sizeof(Header)> encoded;
    wire::encode(named, std::span(payload).first(record.count - 1), encoded);
    record.frames[0] = copy_of(std::array{wire::Frame(encoded)}).front();
  }
  const bool is_tick = header.op == Op::kTick;
  // A call without keys concerns every arc; its arcs are those that were reached.
  log_.append(std::move(record), changed, [&](const ReplicationLog::Stream& stream) {
    mutex_.assert_held();
    return is_tick && !stream.copy ? service_.applied_sum(stream.in_sync) + 1 : 0U;
  });
}

void Endpoint::append_released() {
  for (const Service::ReleasedWrite& write : service_.take_released()) {
    std::array<std::byte, sizeof(Header)> encoded;
    Header header = write.header;
    const std::array<wire::Frame, 1> payload{write.parameters};
    wire::encode(header, payload, encoded);
    const std::array<wire::Frame, 2> frames{wire::Frame(encoded), write.parameters};
    append_request(frames, copy_of(frames), write.changed, write.status, {});
  }
}

// --- data -------------------------------------------------------------------------------------------------

void Endpoint::handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                      MultipartMessage* received, std::uint64_t received_ns) noexcept {
  const Turn turn(*this);
  const Op op = op_of(frames);
  if (op == Op::kReplicate) {
    return receive_record(peer, frames, out);
  }
  if (!log_.has_streams() || op == Op::kPing) {
    service_.handle(peer, frames, out, received, received_ns);
  } else {
    serve_logged(peer, frames, out, received, received_ns);
  }
}

void Endpoint::serve_logged(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                            MultipartMessage* received, std::uint64_t received_ns) noexcept {
  std::vector<SharedFrame> shared;
  const Op op = op_of(frames);
  if (may_change(op) && frames.size() <= wire::kMaxFrames) {
    try {
      shared = share(frames, received);  // before the service takes frames
    } catch (const std::bad_alloc&) {
      return;  // nothing was executed: the peer asks again
    }
  }
  if (held_.bytes() > limits_.held_bytes || log_.unacknowledged_bytes() > limits_.pending_bytes) {
    return service_.turn_away(peer, frames, out);  // which has seen nothing that a failover could undo
  }
  const std::size_t before = out.replies().size();
  service_.handle(peer, frames, out, received, received_ns);
  try {
    const Service::Executed& executed = service_.executed();
    if (!executed.changed.empty() && !shared.empty()) {
      append_request(std::array{shared[0].bytes}, shared, executed.changed, executed.status,
                     executed.key_list);
    }
    append_released();
    if (op == Op::kLoadBegin && executed.status == Status::kOk) {
      log_.stop("a load");
    }
    gate(out, before);
  } catch (const std::bad_alloc&) {
    log_.stop("there was no memory to log a request");
    out.replies().erase(out.replies().begin() + static_cast<std::ptrdiff_t>(before), out.replies().end());
  }
}

void Endpoint::gate(ReplyQueue& out, std::size_t first) noexcept {
  if (held_.empty() && log_.is_committed()) {
    return;
  }
  try {
    held_.hold(out, first, log_.position());
  } catch (const std::bad_alloc&) {
    out.replies().erase(out.replies().begin() + static_cast<std::ptrdiff_t>(first), out.replies().end());
  }
}

void Endpoint::release_held(ReplyQueue& out) noexcept {
  if (!held_.empty() && !log_.is_stopped()) {
    held_.release(out, log_.committed());
  }
}

void Endpoint::released(ReplyQueue& out) noexcept {
  const Turn turn(*this);
  release_held(out);
  const std::size_t before = out.replies().size();
  service_.released(out);
  gate(out, before);
}

void Endpoint::receive_record(std::string_view peer, std::span<const wire::Frame> frames,
                              ReplyQueue& out) noexcept {
  if (wire::decode(frames, {.payload_bytes = limits_.request_bytes, .replies = false}, decoded_)) {
    return service_.handle(peer, frames, out);  // replies what is wrong with it
  }
  const StreamId stream = wire::RecordHeader::stream_of(decoded_.header);
  const bool is_fenced = fenced_.contains(stream);
  if (Follower* const follower = find_follower(stream); follower != nullptr && !is_fenced) {
    return follower->handle(peer, decoded_);
  }
  try {
    // It is unknown as long as the assignment that names it has not arrived.
    queue_acknowledgement(
        out, stream, {.peer = std::string(peer), .status = is_fenced ? Status::kFenced : Status::kRetry});
  } catch (const std::bad_alloc&) {
    // The primary sends it again.
  }
}

void Endpoint::close_incoming(std::span<const StreamId> streams) {
  const Turn turn(*this);
  fenced_.insert(streams.begin(), streams.end());
}

std::map<std::size_t, std::uint64_t> Endpoint::stamps() const {
  const Turn turn(*this);
  std::map<std::size_t, std::uint64_t> stamps;
  for (const auto& follower : followers_) {
    if (follower->fault().empty()) {
      for (const auto& [range, stamp] : follower->stamps()) {
        stamps[range.first] = std::max(stamps[range.first], stamp);
      }
    }
  }
  return stamps;
}

void Endpoint::acknowledge(ReplyQueue& out) noexcept {
  const Turn turn(*this);
  for (const auto& follower : followers_) {
    follower->catch_up();
    try {
      if (const auto owed = follower->acknowledgement()) {
        queue_acknowledgement(out, follower->stream(), *owed);
        follower->acknowledged();
      }
    } catch (const std::bad_alloc&) {
      // Next time.
    }
  }
}

// --- streams ----------------------------------------------------------------------------------------------

std::vector<StreamTarget> Endpoint::targets() const {
  const Turn turn(*this);
  std::vector<StreamTarget> targets;
  for (const auto& [id, stream] : log_.streams()) {
    targets.push_back({.stream = id, .address = stream.address, .server_key = stream.server_key});
  }
  return targets;
}

bool Endpoint::next_message(StreamId stream, StreamMessage& message) noexcept {
  const Turn turn(*this);
  auto* const one = log_.find(stream);
  return one != nullptr && log_.next_message(*one, message);
}

void Endpoint::handle_backup(StreamId stream, std::span<const wire::Frame> frames, ReplyQueue& out) noexcept {
  const Turn turn(*this);
  auto* const one = log_.find(stream);
  const wire::Fault fault =
      wire::decode(frames, {.payload_bytes = limits_.request_bytes, .replies = true}, decoded_);
  const wire::RecordReply reply = wire::RecordReply::of(decoded_.header);
  if (one == nullptr || fault || decoded_.header.op != Op::kReplicate || reply.stream != stream) {
    return;
  }
  log_.acknowledge(*one, reply, decoded_.text);
  release_held(out);
  if (one->copy) {
    copy_arcs();
  }
}

void Endpoint::reconnected(StreamId stream) noexcept {
  const Turn turn(*this);
  if (auto* const one = log_.find(stream); one != nullptr) {
    log_.rewind(*one);
  }
}

void Endpoint::on_time(Milliseconds now, ReplyQueue& out) noexcept {
  const Turn turn(*this);
  log_.on_time(now);
  release_held(out);
  copy_arcs();
}

Milliseconds Endpoint::next_time() const noexcept {
  const Turn turn(*this);
  const bool is_behind =
      std::ranges::any_of(followers_, [](const auto& follower) { return follower->is_behind(); });
  return is_behind ? log_.now() : std::min(log_.next_time(), copy_due_);
}

std::uint64_t Endpoint::position() const {
  const Turn turn(*this);
  return log_.position();
}

bool Endpoint::committed(std::uint64_t position) const {
  const Turn turn(*this);
  return log_.committed() >= position;
}

bool Endpoint::retired() const {
  const Turn turn(*this);
  return std::ranges::all_of(released_, [&](const auto& one) {
    mutex_.assert_held();
    const auto found = log_.streams().find(one.first);
    return found == log_.streams().end() || found->second.acknowledged >= one.second;
  });
}

// --- figures ----------------------------------------------------------------------------------------------

ServiceMetrics Endpoint::metrics() const {
  const Turn turn(*this);
  return service_.metrics();
}

ReplicationStatus Endpoint::replication() const {
  const Turn turn(*this);
  return status();
}

std::optional<ReplicationStatus> Endpoint::replication(std::chrono::milliseconds patience) const {
  return answer_to(patience, [&] {
    mutex_.assert_held();
    return status();
  });
}

ReplicationStatus Endpoint::status() const {
  ReplicationStatus status{.position = log_.position(), .held = held_.size()};
  for (const auto& [id, stream] : log_.streams()) {
    status.streams.push_back(
        {.stream = id,
         .sent = stream.sent,
         .acknowledged = stream.acknowledged,
         .bytes = stream.bytes,
         .silent = static_cast<double>(log_.now() - stream.heard) / 1e3,
         .in_sync = stream.in_sync,
         .arriving = stream.copy ? std::optional<Follower::Arriving>(
                                       {.range = stream.copy->range,
                                        .bytes = stream.copy->bytes,
                                        .total = std::max(stream.copy->bytes, stream.copy->total)})
                                 : std::nullopt,
         .arrived = stream.arrived,
         .fenced = stream.fenced,
         .fault = stream.fault});
  }
  for (const auto& follower : followers_) {
    status.replicas.push_back({.stream = follower->stream(),
                               .position = follower->position(),
                               .in_sync = follower->arcs().ranges(),
                               .arriving = follower->arriving(),
                               .fault = follower->fault()});
  }
  return status;
}

}  // namespace shoal
