// Scatter and gather. A message is decoded once, cut along the arcs, executed by each arc for its slice, at once or
// at the end of a clock, and answered by one reply, in whose memory the arcs have put their slices. A read waits
// until its clock may be read in all arcs, and no arc goes beyond that clock before it is answered: a read sees the
// same clocks in every arc. Replies that a request releases for other peers leave together with its own.
//
//   BSP      A read at c waits for applied >= c; a pull that comes after its clock was applied is refused. A sweep at
//            c waits likewise and precedes the step of c. Arcs may differ in `applied` while a step waits for memory
//            in one of them.
//   SSP(s)   A read at c waits until c - floor <= s; all workers have ticked the clocks below `floor`.
//   ASP      Reads never wait.
//
// Writes are executed once per slot and sequence number; where an arc fails, a repetition continues with it. A TICK
// is accepted, by all arcs, when it is the worker's next one and all pushes that it names have been received; a
// repeated one is acknowledged again; otherwise the reply is RETRY. A BSP step that would exceed the memory budget is
// not made, and the next pulls and pushes of the table report it. A change for which a concurrent save has no memory
// is postponed a few times: the service never waits for a disk.
//
// Arcs move between Services as objects: take_arcs() of one, adopt() of another. What an adopted arc lacks of the
// orders that the other arcs have executed, or they of its orders, is completed when the order is repeated. Until
// then requests of workers that some arc does not know, and of tables that some arc does not have, are refused.
//
// Functions of all rows that change none are computed beside the requests if the rows are many (server/scans.h), but
// for workers under BSP. These may take longer than a worker waits before it asks again: the answer to the last one
// of each worker is kept, and answers its repetitions.

#include "server/service.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/service_table.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

bool has_keys(Op op) noexcept {
  return op == Op::kPull || op == Op::kPush || op == Op::kAssign || op == Op::kErase || op == Op::kContains ||
         op == Op::kState || op == Op::kPrefetch;
}

}  // namespace

bool Service::is_read(const Header& header) noexcept {
  const Op op = header.op;
  return op == Op::kPull || op == Op::kContains || op == Op::kState || op == Op::kPrefetch ||
         op == Op::kSlot || op == Op::kSection || op == Op::kStats ||
         (op == Op::kReduce && !changes(Function{header.aux})) || (op == Op::kSweep && header.aux != 0);
}

Service::Service(Slots slots, const std::vector<SlotRange>& arcs, const ServiceLimits& limits)
    : slots_(slots),
      given_limits_(limits),
      limits_(limits),
      arc_of_(slots.count()),
      key_lists_(limits.key_list_bytes),
      scans_([this](Scan& scan) { finish_scan(scan); }) {
  // A clock is merged in one call, and a merge takes at most 2^32 - 1 hashes.
  SHOAL_CHECK(limits.pending_bytes <= std::size_t{32} << 30U,
              "at most 32 GiB of pushes can wait for their clock, got a limit of " +
                  std::to_string(limits.pending_bytes) + " bytes");
  refused_.reserve(slots.count());
  jobs_.push_back(std::make_unique<JobRequests>());
  serve_ranges(arcs);
}

Service::~Service() { close_sessions(); }

Service::Table* Service::find(std::uint32_t id) noexcept {
  const auto table = tables_.find(id);
  return table == tables_.end() || !table->second->is_everywhere ? nullptr : table->second.get();
}

// --- in ---------------------------------------------------------------------------------------------------------

void Service::handle(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                     MultipartMessage* received, std::uint64_t received_ns) noexcept {
  const std::lock_guard lock(mutex_);
  execute(peer, frames, out, received, received_ns);
}

template <class Serve>
void Service::receive(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                      MultipartMessage* received, std::uint64_t received_ns, const Serve& serve) noexcept {
  const wire::Fault fault =
      wire::decode(frames, {.payload_bytes = limits_.request_bytes, .replies = false}, decoded_);
  const bool is_timed = (decoded_.header.flags & wire::kTimed) != 0;
  const Call call{
      peer, decoded_.header, decoded_.hashes,           decoded_.floats(), decoded_.counts, decoded_.values,
      out,  received,        is_timed ? received_ns : 0};
  shard_ns_ = 0;
  ++metrics_.messages;
  for (const wire::Frame frame : frames) {
    metrics_.bytes_in += frame.size();
  }
  executed_.arcs.clear();
  last_status_ = Status::kInternal;
  executed_.key_list = {};
  try {
    // Reserve room for the reply first: an executed request must not fail because its reply cannot be queued.
    auto& replies = out.replies();
    if (replies.size() == replies.capacity()) {
      replies.reserve(std::max<std::size_t>(16, 2 * replies.size()));
    }
    if (fault) {
      send_text(call, fault.status, fault.message());
    } else {
      ++metrics_.requests[static_cast<std::size_t>(call.header.op)];
      serve(call);
    }
  } catch (const std::exception& error) {
    fail(call, error);
  }
  executed_.status = last_status_;
  executed_.has_keys = !decoded_.hashes.empty() || !executed_.key_list.empty();
}

void Service::execute(std::string_view peer, std::span<const wire::Frame> frames, ReplyQueue& out,
                      MultipartMessage* received, std::uint64_t received_ns) noexcept {
  const std::size_t first_reply = out.replies().size();
  receive(peer, frames, out, received, received_ns, [&](const Call& call) { serve(call); });
  const Header& header = decoded_.header;
  advance(out, (header.flags & wire::kTimed) != 0 ? received_ns : 0);
  if (header.op == Op::kTick && out.replies().size() > first_reply) {
    out.replies()[first_reply].shard_ns = shard_ns_;
  }
}

void Service::turn_away(std::string_view peer, std::span<const wire::Frame> frames,
                        ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
  receive(peer, frames, out, nullptr, 0, [&](const Call& call) { send(call, Status::kOverloaded); });
}

void Service::released(ReplyQueue& out) noexcept {
  const std::lock_guard lock(mutex_);
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

bool Service::check_worker(const Call& call) {
  const Header& header = call.header;
  if (arcs_.empty() && header.epoch < epoch_) {
    refuse_slots(call);
    return false;
  }
  if (!has_begun_ || arcs_.empty()) {
    send(call, Status::kNotAdmitted);
    return false;
  }
  const JobRequests* const job = header.job == kDefaultJob ? nullptr : find_job(header.job);
  if (job == nullptr) {
    send(call, Status::kWrongJob);
    return false;
  }
  const auto asked = std::span(arcs_).first(job->arcs_agree ? 1 : arcs_.size());
  const auto any = [&](Clocks::WorkerState wanted) {
    return std::ranges::any_of(asked, [&](const auto& arc) {
      const JobState* const its = arc->find_job(header.job);
      return its != nullptr && its->clocks.state(header.worker, header.incarnation) == wanted;
    });
  };
  const bool all_have_job =
      std::ranges::all_of(asked, [&](const auto& arc) { return arc->find_job(header.job) != nullptr; });
  if (any(Clocks::WorkerState::kFenced)) {
    send(call, Status::kFenced);
    return false;
  }
  if (!all_have_job || any(Clocks::WorkerState::kUnknown)) {
    send(call, Status::kNotAdmitted);
    return false;
  }
  return true;
}

void Service::refuse_slots(const Call& call) {
  Call known = call;
  if ((call.header.flags & (wire::kKeep | wire::kDigest)) != 0 && !recall(known)) {
    return;
  }
  route(has_keys(call.header.op) ? known.hashes : std::span<const std::uint64_t>());
  if (refused_.empty()) {
    return send(call, {.status = Status::kWrongEpoch}, 1);
  }
  send_done(call, refusal(call.out));
}

bool Service::check_epoch(const Call& call) {
  const bool newest = call.header.epoch >= epoch_ || replays();
  if (!newest) {
    send(call, {.status = Status::kWrongEpoch}, 1);
  }
  return newest;
}

void Service::serve(const Call& call) {
  const Header& header = call.header;
  if (header.op == Op::kPing) {
    return send(call, Status::kOk);
  }
  if (header.op == Op::kReplicate) {
    return send_text(call, Status::kBadRequest, "this endpoint has no replicas");
  }
  if (header.worker == wire::kAnonymous) {
    if (!is_read(header)) {
      return send_text(call, Status::kBadRequest,
                       "a " + std::string(wire::name(header.op)) + " needs a worker: join the job first");
    }
  } else if (!check_worker(call)) {
    return;
  }
  if (header.op == Op::kTick) {
    return tick(call, decoded_.numbers, decoded_.tables);
  }
  if (header.op == Op::kSaveBegin || header.op == Op::kSavePoll || header.op == Op::kSaveEnd) {
    return serve_save(call);
  }
  Table* const table = find(header.table);
  if (table == nullptr) {
    return send(call, Status::kNoTable);
  }
  const bool of_the_map = header.op == Op::kReduce || header.op == Op::kSweep;
  if (of_the_map && header.epoch < epoch_ && !replays()) {  // the map defines which slots the answer covers
    refused_.clear();
    return send(call, {.status = Status::kWrongEpoch}, 1);
  }
  Call known = call;
  if ((header.flags & (wire::kKeep | wire::kDigest)) != 0 && !replays() && !recall(known)) {
    return;
  }
  if ((header.op == Op::kPull || header.op == Op::kPush) && !replays()) {
    hot_keys_.add(header.table, known.hashes);
  }
  if (is_read(header)) {
    return read(known, *table);
  }
  serve_write(known, *table);
}

bool Service::recall(Call& call) {
  const Header& header = call.header;
  if ((header.flags & wire::kDigest) == 0) {
    if (header.worker != wire::kAnonymous) {
      key_lists_.insert(digest(call.hashes, header.job), call.hashes);
    }
    return true;
  }
  const auto list = key_lists_.find(Digest::read(decoded_.digest), header.count);
  ++(list ? metrics_.key_list_hits : metrics_.key_list_misses);
  if (!list) {
    send(call, Status::kUnknownKeyList);
    return false;
  }
  call.hashes = *list;  // stays valid: messages are served one at a time
  executed_.key_list = *list;
  return true;
}

void Service::serve_write(const Call& call, Table& table) {
  switch (call.header.op) {
    case Op::kPush:
      return push(call, table);
    case Op::kAssign:
      return assign(call, table);
    case Op::kErase:
      return erase(call);
    case Op::kLoadBegin:
      return load_begin(call, table, decoded_.numbers);
    case Op::kLoadRows:
      return load_rows(call);
    case Op::kLoadEnd:
      return load_end(call, decoded_.numbers);
    case Op::kLoadFilter:
      return load_filter(call);
    case Op::kReduce:
      return change(call);
    case Op::kSweep:
      return sweep(call);
    default:
      SHOAL_DCHECK(false);
  }
}

// --- slots ------------------------------------------------------------------------------------------------------

bool Service::serves(std::size_t slot) const noexcept {
  return std::ranges::any_of(served_,
                             [&](const Served& served) { return slot >= served.first && slot < served.end; });
}

void Service::route(std::span<const std::uint64_t> hashes) {
  slices_.clear();
  refused_.clear();
  // The first hash, from number `from` on, of this slot or a later one.
  const auto position_of = [&](std::size_t slot, std::size_t from) {
    if (slot == slots_.count()) {
      return hashes.size();
    }
    const std::uint64_t bound = slots_.first_hash(Slot{static_cast<std::uint32_t>(slot)});
    if (from == hashes.size() || hashes[from] >= bound) {
      return from;
    }
    return static_cast<std::size_t>(
        std::lower_bound(hashes.begin() + static_cast<std::ptrdiff_t>(from), hashes.end(), bound) -
        hashes.begin());
  };
  const auto refuse = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end;) {
      const std::size_t slot = index_of(slots_.of(hashes[i]));
      refused_.push_back(static_cast<std::uint16_t>(slot));  // capacity for all slots is reserved
      i = position_of(slot + 1, i);
    }
  };
  std::size_t at = 0;
  for (const Served& served : served_) {
    const std::size_t begin = position_of(served.first, at);
    refuse(at, begin);
    at = position_of(served.end, begin);
    if (begin != at) {
      slices_.push_back({.arc = served.arc, .begin = begin, .count = at - begin, .fresh = {}});
    }
  }
  refuse(at, hashes.size());
}

// --- clocks of the arcs -----------------------------------------------------------------------------------------

Service::JobRequests* Service::find_job(std::uint32_t number) noexcept {
  const auto found = std::ranges::find(jobs_, number, [](const auto& job) { return job->number; });
  return found == jobs_.end() ? nullptr : found->get();
}

const Service::JobRequests* Service::find_job(std::uint32_t number) const noexcept {
  const auto found = std::ranges::find(jobs_, number, [](const auto& job) { return job->number; });
  return found == jobs_.end() ? nullptr : found->get();
}

Service::JobRequests& Service::job_of(const Call& call) noexcept {
  JobRequests* const found = find_job(call.header.job);
  SHOAL_DCHECK(found != nullptr);
  return *found;
}

std::uint32_t Service::number_of(std::uint32_t job) const noexcept {
  return job == kDefaultJob ? jobs_.front()->number : job;
}

Mode Service::mode(std::uint32_t job) const noexcept {
  const JobState* const its = arcs_.empty() ? nullptr : arcs_.front()->find_job(job);
  return its == nullptr ? Mode::kAsp : its->mode;
}

std::uint32_t Service::applied(std::uint32_t job) const noexcept {
  std::optional<std::uint32_t> least;
  for (const auto& arc : arcs_) {
    if (const JobState* const its = arc->find_job(job); its != nullptr) {
      least = std::min(least.value_or(its->applied), its->applied);
    }
  }
  return least.value_or(0);
}

std::uint32_t Service::last_applied(std::uint32_t job) const noexcept {
  std::uint32_t most = 0;
  for (const auto& arc : arcs_) {
    const JobState* const its = arc->find_job(job);
    most = its == nullptr ? most : std::max(most, its->applied);
  }
  return most;
}

std::uint32_t Service::floor(std::uint32_t job) const noexcept {
  std::optional<std::uint32_t> least;
  for (const auto& arc : arcs_) {
    if (const JobState* const its = arc->find_job(job); its != nullptr) {
      least = std::min(least.value_or(its->clocks.floor()), its->clocks.floor());
    }
  }
  return least.value_or(0);
}

std::size_t Service::pending_bytes(std::uint32_t job) const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    const JobState* const its = arc->find_job(job);
    bytes += its == nullptr ? 0 : its->pending.bytes();
  }
  return bytes;
}

std::size_t Service::pending_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    for (const auto& job : arc->jobs()) {
      bytes += job->pending.bytes();
    }
  }
  return bytes;
}

std::size_t Service::next_bytes(std::uint32_t job) const noexcept {
  std::size_t bytes = 0;
  for (const auto& arc : arcs_) {
    const JobState* const its = arc->find_job(job);
    bytes += its == nullptr ? 0 : its->pending.bytes(its->applied);
  }
  return bytes;
}

// --- out --------------------------------------------------------------------------------------------------------

void Service::send(const Call& call, Header header, std::size_t frames, PooledBuffer first,
                   PooledBuffer second) {
  Reply reply;
  reply.peer = call.peer;
  header.magic = wire::kMagic;
  header.version = wire::kVersion;
  // The caller's own bits are returned to it.
  header.flags = static_cast<std::uint16_t>((call.header.flags & 0xff00U) | header.flags | wire::kReply);
  header.op = call.header.op <= wire::kLastOp ? call.header.op : wire::Op::kNone;
  header.table = call.header.table;
  header.worker = call.header.worker;
  header.incarnation = call.header.incarnation;
  header.sequence = call.header.sequence;
  header.clock = (header.flags & wire::kDated) != 0 ? header.clock : call.header.clock;
  header.job = call.header.job;
  header.epoch = epoch_;
  const std::array<wire::Frame, 2> payload{first.bytes(), second.bytes()};
  wire::encode(header, std::span(payload).first(frames), reply.header);
  reply.payload[0] = std::move(first);
  reply.payload[1] = std::move(second);
  reply.frames = frames;
  if (header.status == Status::kOk) {
    reply.received_ns = call.received_ns;
    reply.shard_ns = shard_ns_;
  }
  call.out.add(std::move(reply));
  last_status_ = header.status;
  ++metrics_.replies;
  ++metrics_.statuses[static_cast<std::size_t>(header.status)];
  metrics_.bytes_out += sizeof(Header) + header.payload_bytes;
}

void Service::send(const Call& call, Status status) { send(call, Header{.status = status}); }

void Service::send_text(const Call& call, Status status, std::string_view text) {
  const bool has_text =
      status == Status::kBadRequest || status == Status::kInternal || status == Status::kResourceExhausted;
  if (!has_text) {
    return send(call, status);
  }
  PooledBuffer block = call.out.acquire(text.size());
  std::ranges::copy(std::as_bytes(std::span(text)), block.bytes().begin());
  send(call, {.status = status, .count = static_cast<std::uint32_t>(text.size())}, 1, std::move(block));
}

PooledBuffer Service::refusal(ReplyQueue& out) const {
  PooledBuffer block = out.acquire(refused_.size() * sizeof(std::uint16_t));
  std::copy(refused_.begin(), refused_.end(), block.as<std::uint16_t>().begin());
  return block;
}

void Service::send_done(const Call& call, PooledBuffer refusal, std::uint32_t aux) {
  const auto count = static_cast<std::uint32_t>(refusal.size() / sizeof(std::uint16_t));
  if (count == 0) {
    return send(call, {.status = Status::kOk, .aux = aux});
  }
  send(call, {.status = Status::kWrongEpoch, .count = count, .aux = aux}, 1, std::move(refusal));
}

void Service::fail(const Call& call, const std::exception& error) noexcept {
  const bool theirs = dynamic_cast<const std::invalid_argument*>(&error) != nullptr;
  const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  const bool budget = dynamic_cast<const MemoryBudgetExceededError*>(&error) != nullptr;
  const Status status = theirs   ? Status::kBadRequest
                        : budget ? Status::kResourceExhausted
                                 : Status::kInternal;
  try {
    try {
      send_text(call, status, memory ? "the server has no memory left for this request" : error.what());
    } catch (const std::bad_alloc&) {
      send(call, {.status = status}, 1);  // without text
    }
  } catch (const std::exception&) {
    // Not even that: the peer gets no reply, and asks again.
  }
}

std::vector<Service::ArcLoad> Service::arc_loads() const {
  const std::lock_guard lock(mutex_);
  std::vector<ArcLoad> loads;
  for (const Served& served : served_) {
    ArcLoad load{.range = {.first = served.first, .end = served.end}};
    for (const auto& [id, table] : served.arc->tables()) {
      const ShardStats stats = table.shard->stats();
      load.rows += stats.rows;
      load.bytes += stats.bytes;
      load.touched += stats.rows_pulled + stats.rows_pushed;
    }
    loads.push_back(load);
  }
  return loads;
}

std::vector<Service::TableLoad> Service::table_loads() const {
  const std::lock_guard lock(mutex_);
  std::vector<TableLoad> loads;
  for (const Served& served : served_) {
    for (const auto& [id, table] : served.arc->tables()) {
      loads.push_back({.first_slot = served.first,
                       .table = id,
                       .stats = table.shard->stats(),
                       .tier = table.shard->tier_stats()});
    }
  }
  return loads;
}

std::pair<std::vector<HotKey>, std::uint64_t> Service::hot_keys(std::size_t most) const {
  const std::lock_guard lock(mutex_);
  return {hot_keys_.hottest(most), hot_keys_.sampled()};
}

ServiceMetrics Service::metrics() const {
  const std::lock_guard lock(mutex_);
  ServiceMetrics now = metrics_;
  for (const auto& job : jobs_) {
    now.deferred_reads += job->deferred.size();
    now.deferred_bytes += job->deferred.bytes();
  }
  now.pending_bytes = pending_bytes();
  now.key_lists = key_lists_.size();
  now.key_list_bytes = key_lists_.bytes();
  now.budget_bytes = budget_bytes().value_or(0);
  const auto clocks_of = [&](std::uint32_t number) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> clocks;
    const JobState* const its = arcs_.empty() ? nullptr : arcs_.front()->find_job(number);
    const std::size_t ranks = its == nullptr ? 0 : its->clocks.workers().size();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Clocks::Worker& worker = its->clocks.workers()[rank];
      if (worker.admitted) {
        clocks.emplace_back(static_cast<std::uint32_t>(rank), worker.clock);
      }
    }
    return clocks;
  };
  now.applied = applied(kDefaultJob);
  now.floor = floor(kDefaultJob);
  now.clocks = clocks_of(kDefaultJob);
  for (const auto& job : std::span(jobs_).subspan(1)) {
    now.jobs.push_back({.number = job->number,
                        .applied = applied(job->number),
                        .floor = floor(job->number),
                        .clocks = clocks_of(job->number)});
  }
  return now;
}

}  // namespace shoal
