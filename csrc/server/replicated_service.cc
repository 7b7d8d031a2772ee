#include "server/replicated_service.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

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

// Tries to lock for some time. Not with a std::timed_mutex: the thread sanitizer of g++ 12 does not know what that calls.
std::unique_lock<std::mutex> lock_within(std::mutex& mutex, std::chrono::milliseconds patience) {
  constexpr std::chrono::microseconds kPause{100};
  const auto end = std::chrono::steady_clock::now() + patience;
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock.owns_lock() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPause);
    (void)lock.try_lock();
  }
  return lock;
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

}  // namespace

ReplicatedService::ReplicatedService(Slots slots, const std::vector<SlotRange>& arcs,
                                     const ServiceLimits& limits)
    : service_(slots, arcs, limits), limits_(limits) {
  service_.set_save_filter([this] { return admit_save(); });
}

// --- orders -----------------------------------------------------------------------------------------------------

void ReplicatedService::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  service_.set_waker(waker);
  waker_ = std::move(waker);
}

void ReplicatedService::wake() {
  if (waker_) {
    waker_();
  }
}

template <class Act>
auto ReplicatedService::control(Order order, const Act& act) {
  const std::lock_guard lock(mutex_);
  const auto append = [&] {
    if (!log_.has_streams()) {
      return;
    }
    try {
      append_order(order);
      append_released();
    } catch (const std::bad_alloc&) {
      log_.stop("there was no memory to log an order");
    }
    wake();
  };
  if constexpr (std::is_void_v<decltype(act())>) {
    act();
    append();
  } else {
    auto result = act();
    append();
    return result;
  }
}

void ReplicatedService::set_map(std::uint32_t epoch, const std::vector<SlotRange>& ranges) {
  const std::lock_guard lock(mutex_);
  service_.set_map(epoch, ranges);
}

void ReplicatedService::start_job(std::uint32_t job, Mode mode, std::uint32_t staleness, bool mean,
                                  std::uint32_t before, bool is_named) {
  control(StartJob{job, mode, staleness, mean, before, is_named},
          [&] { service_.start_job(job, mode, staleness, mean, before, is_named); });
}

void ReplicatedService::end_job(std::uint32_t job) {
  control(EndJob{job}, [&] { service_.end_job(job); });
}

void ReplicatedService::admit(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
                              std::uint32_t job) {
  control(Admit{rank, incarnation, clock, job}, [&] { service_.admit(rank, incarnation, clock, job); });
}

LastTick ReplicatedService::fence(std::uint32_t rank, std::uint32_t incarnation, std::uint32_t job) {
  return control(Fence{rank, incarnation, job}, [&] { return service_.fence(rank, incarnation, job); });
}

std::uint32_t ReplicatedService::dismiss(std::uint32_t rank, std::uint32_t incarnation, const LastTick& last,
                                         std::uint32_t job) {
  return control(Dismiss{rank, incarnation, last, job},
                 [&] { return service_.dismiss(rank, incarnation, last, job); });
}

std::uint32_t ReplicatedService::hold(std::uint32_t job) {
  return control(Hold{job}, [&] { return service_.hold(job); });
}

void ReplicatedService::resume(std::uint32_t job) {
  control(Resume{job}, [&] { service_.resume(job); });
}

void ReplicatedService::set_memory(std::uint64_t slot_bytes) {
  control(SetMemory{slot_bytes}, [&] { service_.set_memory(slot_bytes); });
}

void ReplicatedService::add_table(std::uint32_t id, const TableSpec& spec) {
  // Not under the mutex, which would delay requests: the table's first request comes after the order was reported done.
  service_.add_table(id, spec);
  control(AddTable{id, spec}, [] {});
}

void ReplicatedService::drop_table(std::uint32_t id) {
  control(DropTable{id}, [&] { service_.drop_table(id); });
}

// --- the log ----------------------------------------------------------------------------------------------------

void ReplicatedService::append_order(const Order& order, std::optional<StreamId> stream) {
  auto bytes = std::make_shared<const std::vector<std::byte>>(encode(order));
  LogRecord record{.kind = wire::Record::kOrder, .count = 1};
  record.frames[0] = {.bytes = *bytes, .owner = bytes};
  log_.append(std::move(record), {}, [](const auto&) { return 0U; }, stream);
}

void ReplicatedService::append_request(std::span<const wire::Frame> frames,
                                       std::span<const SharedFrame> shared,
                                       const Service::Executed& executed) {
  LogRecord record{.kind = wire::Record::kRequest,
                   .status = executed.status,
                   .end_slot = static_cast<std::uint32_t>(executed.arcs.back().end),
                   .count = shared.size()};
  std::ranges::copy(shared, record.frames.begin());
  const Header header = wire::peek(frames).value_or(Header{});
  if ((header.flags & wire::kDigest) != 0) {
    // The replica has no key lists: it gets the list that the digest named.
    Header named = header;
    named.flags &= static_cast<std::uint16_t>(~wire::kDigest);
    record.frames[1] = copy_of(std::array{std::as_bytes(executed.key_list)}).front();
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
  log_.append(std::move(record), executed.arcs, [&](const ReplicationLog::Stream& stream) {
    return is_tick && !stream.copy ? service_.applied_sum(stream.in_sync) + 1 : 0U;
  });
}

void ReplicatedService::append_released() {
  for (const Service::ReleasedWrite& write : service_.take_released()) {
    std::array<std::byte, sizeof(Header)> encoded;
    Header header = write.header;
    const std::array<wire::Frame, 1> payload{write.parameters};
    wire::encode(header, payload, encoded);
    const std::array<wire::Frame, 2> frames{wire::Frame(encoded), write.parameters};
    append_request(frames, copy_of(frames), write.executed);
  }
}

// --- data -------------------------------------------------------------------------------------------------------

void ReplicatedService::handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                               MultipartMessage* received, std::uint64_t received_ns) noexcept {
  const std::lock_guard lock(mutex_);
  const Op op = op_of(frames);
  if (op == Op::kReplicate) {
    return receive_record(peer, frames, out);
  }
  if (!log_.has_streams() || op == Op::kPing) {
    return service_.handle(peer, frames, out, received, received_ns);
  }
  serve_logged(peer, frames, out, received, received_ns);
}

void ReplicatedService::serve_logged(std::string_view peer, std::span<const wire::Frame> frames,
                                     ReplyQueue& out, MultipartMessage* received,
                                     std::uint64_t received_ns) noexcept {
  std::vector<SharedFrame> shared;
  const Op op = op_of(frames);
  if (may_change(op) && frames.size() <= wire::kMaxFrames) {
    try {
      shared = share(frames, received);  // before the service takes frames
    } catch (const std::bad_alloc&) {
      return;  // nothing was executed: the peer asks again
    }
  }
  if (log_.held_bytes() > limits_.held_bytes || log_.unacknowledged_bytes() > limits_.pending_bytes) {
    return service_.turn_away(peer, frames, out);  // which has seen nothing that a failover could undo
  }
  const std::size_t before = out.replies().size();
  service_.handle(peer, frames, out, received, received_ns);
  try {
    const Service::Executed& executed = service_.executed();
    if (!executed.arcs.empty()) {
      append_request(std::array{shared[0].bytes}, shared, executed);
    }
    append_released();
    if (op == Op::kLoadBegin && executed.status == Status::kOk) {
      log_.stop("a load");
    }
    if (!log_.open_gate()) {
      log_.hold(out, before);
    }
  } catch (const std::bad_alloc&) {
    log_.stop("there was no memory to log a request");
    out.replies().erase(out.replies().begin() + static_cast<std::ptrdiff_t>(before), out.replies().end());
  }
}

void ReplicatedService::released(ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
  log_.release(out);
  const std::size_t before = out.replies().size();
  service_.released(out);
  if (log_.open_gate()) {
    return;
  }
  try {
    log_.hold(out, before);
  } catch (const std::bad_alloc&) {
    out.replies().erase(out.replies().begin() + static_cast<std::ptrdiff_t>(before), out.replies().end());
  }
}

void ReplicatedService::receive_record(std::string_view peer, std::span<const wire::Frame> frames,
                                       ReplyQueue& out) noexcept {
  if (wire::decode(frames, {.payload_bytes = limits_.request_bytes, .replies = false}, decoded_)) {
    return service_.handle(peer, frames, out);  // replies what is wrong with it
  }
  const StreamId stream = decoded_.header.stream();
  const bool is_fenced = fenced_.contains(stream);
  if (Replica* const replica = find_replica(stream); replica != nullptr && !is_fenced) {
    return replica->handle(peer, decoded_);
  }
  try {
    // It is unknown as long as the assignment that names it has not arrived.
    queue_replicate_reply(out, peer, stream, is_fenced ? Status::kFenced : Status::kRetry, 0);
  } catch (const std::bad_alloc&) {
    // The primary sends it again.
  }
}

void ReplicatedService::close_incoming(std::span<const StreamId> streams) {
  const std::lock_guard lock(mutex_);
  fenced_.insert(streams.begin(), streams.end());
}

std::map<std::size_t, std::uint64_t> ReplicatedService::stamps() const {
  const std::lock_guard lock(mutex_);
  std::map<std::size_t, std::uint64_t> all;
  for (const auto& replica : replicas_) {
    if (replica->fault().empty()) {
      for (const auto& [range, stamp] : replica->stamps()) {
        all[range.first] = std::max(all[range.first], stamp);
      }
    }
  }
  return all;
}

void ReplicatedService::acknowledge(ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& replica : replicas_) {
    replica->catch_up();
    try {
      replica->acknowledge(out);
    } catch (const std::bad_alloc&) {
      // Next time.
    }
  }
}

// --- streams ----------------------------------------------------------------------------------------------------

std::vector<StreamTarget> ReplicatedService::targets() const {
  const std::lock_guard lock(mutex_);
  std::vector<StreamTarget> all;
  for (const auto& [id, stream] : log_.streams()) {
    all.push_back({.stream = id, .address = stream.address, .server_key = stream.server_key});
  }
  return all;
}

bool ReplicatedService::next_message(StreamId stream, StreamMessage& message) noexcept {
  const std::lock_guard lock(mutex_);
  auto* const one = log_.find(stream);
  return one != nullptr && log_.next_message(*one, message);
}

void ReplicatedService::handle_backup(StreamId stream, std::span<const wire::Frame> frames,
                                      ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
  auto* const one = log_.find(stream);
  const wire::Fault fault =
      wire::decode(frames, {.payload_bytes = limits_.request_bytes, .replies = true}, decoded_);
  if (one == nullptr || fault || decoded_.header.op != Op::kReplicate || decoded_.header.stream() != stream) {
    return;
  }
  log_.acknowledge(*one, decoded_.header, decoded_.text);
  log_.release(out);
  if (one->copy) {
    copy_arcs();
  }
}

void ReplicatedService::reconnected(StreamId stream) noexcept {
  const std::lock_guard lock(mutex_);
  if (auto* const one = log_.find(stream); one != nullptr) {
    log_.rewind(*one);
  }
}

void ReplicatedService::on_time(Milliseconds now, ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
  log_.on_time(now);
  log_.release(out);
  copy_arcs();
}

Milliseconds ReplicatedService::next_time() const noexcept {
  const std::lock_guard lock(mutex_);
  const bool is_behind = std::ranges::any_of(replicas_, [](const auto& one) { return one->is_behind(); });
  return is_behind ? log_.now() : std::min(log_.next_time(), copy_due_);
}

std::uint64_t ReplicatedService::position() const {
  const std::lock_guard lock(mutex_);
  return log_.position();
}

bool ReplicatedService::committed(std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  return log_.committed() >= position;
}

bool ReplicatedService::retired() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(released_, [&](const auto& one) {
    const auto found = log_.streams().find(one.first);
    return found == log_.streams().end() || found->second.acknowledged >= one.second;
  });
}

ReplicationStatus ReplicatedService::replication() const {
  const std::lock_guard lock(mutex_);
  return status();
}

std::optional<ReplicationStatus> ReplicatedService::replication(std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(status()) : std::nullopt;
}

std::optional<ServiceMetrics> ReplicatedService::metrics(std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(service_.metrics()) : std::nullopt;
}

std::optional<std::vector<Service::ArcLoad>> ReplicatedService::arc_loads(
    std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(service_.arc_loads()) : std::nullopt;
}

std::optional<std::vector<Service::TableLoad>> ReplicatedService::table_loads(
    std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(service_.table_loads()) : std::nullopt;
}

std::optional<std::pair<std::vector<HotKey>, std::uint64_t>> ReplicatedService::hot_keys(
    std::size_t most, std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(service_.hot_keys(most)) : std::nullopt;
}

std::optional<std::vector<std::int64_t>> ReplicatedService::peek(std::uint32_t id,
                                                                 std::span<const std::uint64_t> hashes,
                                                                 std::chrono::milliseconds patience) const {
  const std::unique_lock lock = lock_within(mutex_, patience);
  return lock.owns_lock() ? std::optional(service_.peek(id, hashes)) : std::nullopt;
}

ReplicationStatus ReplicatedService::status() const {
  ReplicationStatus status{.position = log_.position(), .held = log_.held()};
  for (const auto& [id, stream] : log_.streams()) {
    status.streams.push_back(
        {.stream = id,
         .sent = stream.sent,
         .acknowledged = stream.acknowledged,
         .bytes = stream.bytes,
         .silent = static_cast<double>(log_.now() - stream.heard) / 1e3,
         .in_sync = stream.in_sync,
         .arriving = stream.copy ? std::optional<Replica::Arriving>(
                                       {.range = stream.copy->range,
                                        .bytes = stream.copy->bytes,
                                        .total = std::max(stream.copy->bytes, stream.copy->total)})
                                 : std::nullopt,
         .arrived = stream.arrived,
         .fenced = stream.fenced,
         .fault = stream.fault});
  }
  for (const auto& replica : replicas_) {
    status.replicas.push_back({.stream = replica->stream(),
                               .position = replica->position(),
                               .in_sync = replica->service().arcs(),
                               .arriving = replica->arriving(),
                               .fault = replica->fault()});
  }
  return status;
}

}  // namespace shoal
