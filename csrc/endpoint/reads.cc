// A read waits until its clock may be read in all arcs, and no arc goes beyond that clock before it is
// answered: a read sees the same clocks in every arc.
//
//   BSP      A read at c waits for applied >= c; a pull that comes after its clock was applied is refused. A
//            sweep at c waits likewise and precedes the step of c. Arcs may differ in `applied` while a step
//            waits for memory in one of them.
//   SSP(s)   A read at c waits until c - floor <= s; all workers have ticked the clocks below `floor`.
//   ASP      Reads never wait.

#include "endpoint/reads.h"

#include <algorithm>
#include <string>
#include <utility>

#include "wire/values.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

std::uint32_t count_of(std::size_t n) noexcept { return static_cast<std::uint32_t>(n); }

bool is_of_one_slot(Op op) noexcept { return op == Op::kSlot || op == Op::kSection; }

// Of a reply; 0: known only once it is made.
std::size_t reply_bytes(const RequestContext& request, const ServedTable& table) noexcept {
  const Rows& rows = table.rows;
  switch (request.header.op) {
    case Op::kPull:
      return request.hashes.size() * ServiceState::width_of(request, table) * sizeof(float);
    case Op::kContains:
      return request.hashes.size();
    case Op::kState:
      return request.hashes.size() * (request.header.aux == rows.columns() ? 1 : rows.dim()) * sizeof(float);
    default:
      return 0;
  }
}

// Calls use(shard, slices, begin) for each slice.
template <class Use>
void each_slice(const ServiceState& state, RequestContext& request, const Use& use) {
  for (const Slice& slice : state.cut.slices) {
    const SlotSlices part = slice.arc->cut(request.hashes.subspan(slice.begin, slice.count));
    state.in_rows(request, [&] { use(*slice.arc->find(request.header.table)->shard, part, slice.begin); });
  }
}

// The number of clocks all of whose pushes the rows of the slices include under SSP.
std::uint32_t included(const Cut& cut, std::uint32_t job) noexcept {
  std::uint32_t clocks = ~std::uint32_t{0};
  for (const Slice& slice : cut.slices) {
    if (const JobState* const known = slice.arc->jobs().find(job); known != nullptr) {
      clocks = std::min(clocks, known->mode == Mode::kBsp ? known->applied : known->clocks.floor());
    }
  }
  return cut.slices.empty() ? 0 : clocks;
}

// Weights as requested: in 16 bits, without their zeros; `pushes`: of the table, that they include.
Answer weights_answer(ServiceState& state, const RequestContext& request, PooledBuffer values,
                      std::size_t dim, std::uint64_t pushes) {
  Answer answer{.header = {.dtype = wire::Dtype::kFloat32,
                           .dim = static_cast<std::uint16_t>(dim),
                           .count = count_of(request.hashes.size()),
                           .aux = static_cast<std::uint32_t>(pushes)},
                .frames = 1};
  Header& header = answer.header;
  header.flags = request.header.flags & wire::kWhole;
  if ((request.header.flags & wire::kDated) != 0) {
    header.flags |= wire::kDated;
    header.clock = included(state.cut, request.is_anonymous() ? kDefaultJob : request.header.job);
  }
  const std::size_t size = request.hashes.size() * dim;
  const std::size_t plain = values.size();
  if (request.header.dtype != wire::Dtype::kFloat32) {
    header.dtype = request.header.dtype;
    const Dtype dtype = header.dtype == wire::Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;
    const std::uint64_t who = (std::uint64_t{request.header.worker} << 32U) | request.header.incarnation;
    PooledBuffer halves = request.out.acquire(size * sizeof(std::uint16_t));
    narrow(values.as<float>(), request.hashes, dim, dtype, who, request.header.sequence,
           halves.as<std::uint16_t>(), state.metrics.narrowed);
    values = std::move(halves);
  }
  const auto pack_into = [&]<class Word>(std::span<const Word> words) {
    const std::size_t kept = count_nonzero(words) * sizeof(Word);
    if (map_bytes(size) + kept >= values.size()) {
      return false;
    }
    answer.first = request.out.acquire(map_bytes(size));
    answer.second = request.out.acquire(kept);
    answer.frames = 2;
    pack(words, answer.first.bytes(), answer.second.as<Word>());
    header.flags |= wire::kPacked;
    return true;
  };
  const bool is_packed = (request.header.flags & wire::kPacked) != 0 &&
                         (header.dtype == wire::Dtype::kFloat32
                              ? pack_into(std::span<const float>(values.as<float>()))
                              : pack_into(std::span<const std::uint16_t>(values.as<std::uint16_t>())));
  if (!is_packed) {
    answer.first = std::move(values);
  }
  state.metrics.weight_bytes_saved += plain - answer.first.size() - answer.second.size();
  return answer;
}

Outcome answer_pull(ServiceState& state, RequestContext& request, const ServedTable& table) {
  const std::size_t dim = ServiceState::width_of(request, table);
  PooledBuffer values = request.out.acquire(request.hashes.size() * dim * sizeof(float));
  each_slice(state, request, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    const std::span<float> rows = values.as<float>().subspan(begin * dim, part.hashes.size() * dim);
    if (request.is_whole()) {
      shard.pull_whole(part, rows, &state.workspace.shard);
    } else {
      shard.pull(part, rows, nullptr, &state.workspace.shard);
    }
  });
  return weights_answer(state, request, std::move(values), dim, table.pushes);
}

Outcome answer_contains(const ServiceState& state, RequestContext& request) {
  PooledBuffer found = request.out.acquire(request.hashes.size());
  each_slice(state, request, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    shard.contains(part, found.as<std::uint8_t>().subspan(begin, part.hashes.size()));
  });
  return Answer{.header = {.dtype = wire::Dtype::kUint8, .count = count_of(request.hashes.size())},
                .frames = 1,
                .first = std::move(found)};
}

Outcome answer_prefetch(const ServiceState& state, RequestContext& request) {
  bool reads = false;
  each_slice(state, request, [&](const Shard& shard, const SlotSlices& part, std::size_t /*begin*/) {
    reads = shard.prefetch(part) || reads;
  });
  return Answer{.header = {.aux = reads ? 1U : 0U}};
}

Outcome answer_state(const ServiceState& state, RequestContext& request, const ServedTable& table) {
  const std::size_t column = request.header.aux;
  const std::size_t dim = column == table.rows.columns() ? 1 : table.rows.dim();
  PooledBuffer values = request.out.acquire(request.hashes.size() * dim * sizeof(float));
  each_slice(state, request, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    shard.state(part, column, values.as<float>().subspan(begin * dim, part.hashes.size() * dim));
  });
  return Answer{.header = {.dtype = wire::Dtype::kFloat32,
                           .dim = static_cast<std::uint16_t>(dim),
                           .count = count_of(request.hashes.size()),
                           .aux = request.header.aux},
                .frames = 1,
                .first = std::move(values)};
}

// The slot's shard, for reads of one slot.
const Shard& shard_of(const ServiceState& state, const Header& header) {
  return *state.arcs.arc_of(header.aux)->find(header.table)->shard;
}

Outcome answer_slot(const ServiceState& state, const RequestContext& request) {
  const Header& header = request.header;
  const Shard& shard = shard_of(state, header);
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  shard.read_slot(Slot{header.aux}, hashes, weights);
  const std::size_t bytes = hashes.size() * sizeof(std::uint64_t) + weights.size() * sizeof(float);
  if (bytes > state.limits.reply_bytes) {
    return bad_request("slot " + std::to_string(header.aux) + " has " + std::to_string(bytes) +
                       " bytes, at most " + std::to_string(state.limits.reply_bytes) +
                       " are sent: use more slots");
  }
  Answer answer{.header = {.dtype = wire::Dtype::kFloat32,
                           .dim = static_cast<std::uint16_t>(shard.rows().dim()),
                           .count = count_of(hashes.size()),
                           .aux = header.aux},
                .frames = 2,
                .first = request.out.acquire(hashes.size() * sizeof(std::uint64_t)),
                .second = request.out.acquire(weights.size() * sizeof(float))};
  std::ranges::copy(hashes, answer.first.as<std::uint64_t>().begin());
  std::ranges::copy(weights, answer.second.as<float>().begin());
  return answer;
}

Outcome answer_section(const ServiceState& state, const RequestContext& request) {
  const Slot slot{request.header.aux};
  const Shard& shard = shard_of(state, request.header);
  std::vector<std::byte> bytes;
  const std::size_t rows = shard.section(slot, bytes);
  std::vector<std::byte> filter;
  shard.filter(slot, filter);
  bytes.insert(bytes.end(), filter.begin(), filter.end());
  if (bytes.size() > state.limits.reply_bytes) {
    return bad_request("the section of slot " + std::to_string(request.header.aux) + " has " +
                       std::to_string(bytes.size()) + " bytes, at most " +
                       std::to_string(state.limits.reply_bytes) + " are sent: use more slots");
  }
  PooledBuffer block = request.out.acquire(bytes.size());
  std::ranges::copy(bytes, block.bytes().begin());
  return Answer{
      .header = {.dtype = wire::Dtype::kUint8, .count = count_of(rows), .aux = count_of(filter.size())},
      .frames = 1,
      .first = std::move(block)};
}

// Of each arc its first slot and its step.
Outcome answer_steps(const ServiceState& state, const RequestContext& request) {
  std::vector<std::uint64_t> numbers;
  for (const auto& arc : state.arcs.arcs()) {
    numbers.push_back(arc->first_slot());
    numbers.push_back(arc->find(request.header.table)->shard->step());
  }
  return words_answer(numbers, request.out);
}

// The step, the statistics of the shards, how many arcs have a tier, their statistics, and the table's clock.
Outcome answer_stats(const ServiceState& state, const RequestContext& request) {
  const Header& header = request.header;
  std::vector<std::uint64_t> numbers(1 + kShardStatistics.size() + 1 + kTierStatistics.size() + 1);
  std::uint64_t& step = numbers.front();
  std::uint64_t* const shards = numbers.data() + 1;
  std::uint64_t* const tiers = shards + kShardStatistics.size();
  std::uint64_t& clock = numbers.back();
  for (const auto& arc : state.arcs.arcs()) {
    const Shard& shard = *arc->find(header.table)->shard;
    step = std::max(step, shard.step());
    clock = std::max<std::uint64_t>(
        clock, shard.table_clock(arc->store_clock(header.job, header.table, header.clock)));
    add_statistics(kShardStatistics, shard.stats(), shards);
    if (const auto tier = shard.tier_stats(); tier.has_value()) {
      ++tiers[0];
      add_statistics(kTierStatistics, *tier, tiers + 1);
    }
  }
  return words_answer(numbers, request.out);
}

}  // namespace

bool has_keys(Op op) noexcept {
  return op == Op::kPull || op == Op::kPush || op == Op::kAssign || op == Op::kErase || op == Op::kContains ||
         op == Op::kState || op == Op::kPrefetch;
}

bool is_read(const Header& header) noexcept {
  const Op op = header.op;
  return op == Op::kPull || op == Op::kContains || op == Op::kState || op == Op::kPrefetch ||
         op == Op::kSlot || op == Op::kSection || op == Op::kStats ||
         (op == Op::kReduce && !changes(Function{header.aux})) || (op == Op::kSweep && header.aux != 0);
}

void cut_read(ServiceState& state, const Header& header, std::span<const std::uint64_t> hashes) {
  state.arcs.cut(hashes, state.cut);
  if (is_of_one_slot(header.op) && !state.arcs.serves(header.aux)) {
    state.cut.refused.push_back(static_cast<std::uint16_t>(header.aux));
  }
}

Outcome read(ServiceState& state, RequestContext& request, ServedTable& table) {
  const Header& header = request.header;
  if (is_of_one_slot(header.op) && header.aux >= state.slots.count()) {
    return bad_request("there is no slot " + std::to_string(header.aux) + " of " +
                       std::to_string(state.slots.count()));
  }
  cut_read(state, header, request.hashes);
  if (!state.cut.refused.empty()) {
    return done(refused_slots(state.cut, request.out));
  }
  if (header.op == Op::kPull) {
    if (const StepFailure* const failed = ArcGroup::failed_step(state.cut, header.table); failed != nullptr) {
      return Refusal{failed->status, failed->text};
    }
    if (auto refusal = check_whole(state, request, table)) {
      return *std::move(refusal);
    }
    if (auto refusal = check_dtype(request, table)) {
      return *std::move(refusal);
    }
  }
  const std::size_t bytes = reply_bytes(request, table);
  if (bytes > state.limits.reply_bytes) {
    return bad_request("the reply would have " + std::to_string(bytes) + " bytes, at most " +
                       std::to_string(state.limits.reply_bytes) + " are sent: ask for fewer keys at a time");
  }
  if (!request.is_anonymous()) {
    // Of the arcs that it reads: others, which have come from elsewhere, may be further.
    const auto applied = [&](const Slice& slice) { return slice.arc->jobs().find(header.job)->applied; };
    const auto late = std::ranges::find_if(state.cut.slices,
                                           [&](const Slice& slice) { return header.clock < applied(slice); });
    if (state.arcs.mode(header.job) == Mode::kBsp && header.op == Op::kPull &&
        late != state.cut.slices.end()) {
      return bad_request("a pull at clock " + std::to_string(header.clock) +
                         " came after the pushes of clock " + std::to_string(applied(*late) - 1) +
                         " were applied: tick a clock when its pulls are answered");
    }
    if (header.op != Op::kPrefetch && !state.arcs.is_complete(header.job, header.clock)) {
      return defer(state, request, bytes);
    }
  }
  return answer(state, request, table);
}

Outcome defer(ServiceState& state, const RequestContext& request, std::size_t reply_bytes) {
  const std::size_t bytes = request.hashes.size_bytes() + request.bytes.size() + reply_bytes;
  DeferredReads& deferred = state.job_of(request).deferred;
  const bool is_full = deferred.size() >= state.limits.deferred_reads ||
                       deferred.bytes() + bytes > state.limits.deferred_bytes;
  if (is_full && !deferred.has(request.header)) {
    return Refusal{Status::kOverloaded};
  }
  PooledBuffer hashes = state.workspace.buffers.acquire(request.hashes.size_bytes());
  std::ranges::copy(request.hashes, hashes.as<std::uint64_t>().begin());
  PooledBuffer parameters = state.workspace.buffers.acquire(request.bytes.size());
  std::ranges::copy(request.bytes, parameters.bytes().begin());
  deferred.defer({.peer = Peer(request.peer),
                  .header = request.header,
                  .hashes = std::move(hashes),
                  .parameters = std::move(parameters),
                  .reply_bytes = reply_bytes,
                  .received_ns = request.received_ns});
  state.metrics.deferred_peak = std::max(state.metrics.deferred_peak, deferred.size());
  return Refusal{Status::kDeferred};
}

Outcome answer(ServiceState& state, RequestContext& request, ServedTable& table) {
  if (!request.is_anonymous() && request.header.op == Op::kPull) {
    state.view(request) = {.pushes = table.pushes, .own = 0};
    const auto& arcs = state.arcs.arcs();
    const std::uint32_t slowest =
        arcs.empty() ? 0 : arcs.front()->jobs().find(request.header.job)->clocks.slowest();
    state.metrics.pull_staleness.add(request.header.clock > slowest ? request.header.clock - slowest : 0);
  }
  switch (request.header.op) {
    case Op::kPull:
      return answer_pull(state, request, table);
    case Op::kContains:
      return answer_contains(state, request);
    case Op::kState:
      return answer_state(state, request, table);
    case Op::kPrefetch:
      return answer_prefetch(state, request);
    case Op::kSlot:
      return answer_slot(state, request);
    case Op::kSection:
      return answer_section(state, request);
    case Op::kReduce:
    case Op::kSweep:
      return answer_function(state, request);
    default:
      return request.header.aux == 1 ? answer_steps(state, request) : answer_stats(state, request);
  }
}

}  // namespace shoal
