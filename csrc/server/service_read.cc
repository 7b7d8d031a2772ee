// Service: reads, which may wait for their clock.

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/int64_pairs.h"
#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

using wire::Header;
using wire::Op;
using wire::Status;

namespace {

std::uint32_t count_of(std::size_t n) noexcept { return static_cast<std::uint32_t>(n); }

bool is_of_one_slot(Op op) noexcept { return op == Op::kSlot || op == Op::kSection; }

}  // namespace

std::size_t Service::reply_bytes(const Call& call, const Table& table) const noexcept {
  const Rows& rows = table.rows;
  switch (call.header.op) {
    case Op::kPull:
      return call.hashes.size() * width_of(call, table) * sizeof(float);
    case Op::kContains:
      return call.hashes.size();
    case Op::kState:
      return call.hashes.size() * (call.header.aux == rows.columns() ? 1 : rows.dim()) * sizeof(float);
    default:
      return 0;  // known only once it is made
  }
}

void Service::find_refused(const Header& header, std::span<const std::uint64_t> hashes) {
  route(hashes);
  if (is_of_one_slot(header.op) && !serves(header.aux)) {
    refused_.push_back(static_cast<std::uint16_t>(header.aux));
  }
}

void Service::read(const Call& call, Table& table) {
  const Header& header = call.header;
  if (is_of_one_slot(header.op) && header.aux >= slots_.count()) {
    return send_text(
        call, Status::kBadRequest,
        "there is no slot " + std::to_string(header.aux) + " of " + std::to_string(slots_.count()));
  }
  find_refused(header, call.hashes);
  if (!refused_.empty()) {
    return send_done(call, refusal(call.out));
  }
  if (const std::string_view why = full(call); header.op == Op::kPull && !why.empty()) {
    return send_text(call, status_of_full(why), why);
  }
  if (header.op == Op::kPull && (!check_whole(call, table) || !check_dtype(call, table))) {
    return;
  }
  const std::size_t bytes = reply_bytes(call, table);
  if (bytes > limits_.reply_bytes) {
    return send_text(call, Status::kBadRequest,
                     "the reply would have " + std::to_string(bytes) + " bytes, at most " +
                         std::to_string(limits_.reply_bytes) + " are sent: ask for fewer keys at a time");
  }
  if (header.worker != wire::kAnonymous) {
    // Of the arcs that it reads: others, which have come from elsewhere, may be further.
    const auto late = std::ranges::find_if(
        slices_, [&](const Slice& slice) { return header.clock < state(*slice.arc, header.job).applied; });
    if (mode(header.job) == Mode::kBsp && header.op == Op::kPull && late != slices_.end()) {
      return send_text(call, Status::kBadRequest,
                       "a pull at clock " + std::to_string(header.clock) +
                           " came after the pushes of clock " +
                           std::to_string(state(*late->arc, header.job).applied - 1) +
                           " were applied: tick a clock when its pulls are answered");
    }
    if (header.op != Op::kPrefetch && !is_complete(header.job, header.clock)) {
      return defer(call, bytes);
    }
  }
  answer(call, table);
}

void Service::defer(const Call& call, std::size_t reply_bytes) {
  const std::size_t bytes = call.hashes.size_bytes() + call.bytes.size() + reply_bytes;
  DeferredReads& deferred = job_of(call).deferred;
  const bool full =
      deferred.size() >= limits_.deferred_reads || deferred.bytes() + bytes > limits_.deferred_bytes;
  if (full && !replays() && !deferred.has(call.header)) {
    return send(call, Status::kOverloaded);
  }
  PooledBuffer hashes = workspace_.buffers.acquire(call.hashes.size_bytes());
  std::ranges::copy(call.hashes, hashes.as<std::uint64_t>().begin());
  PooledBuffer parameters = workspace_.buffers.acquire(call.bytes.size());
  std::ranges::copy(call.bytes, parameters.bytes().begin());
  deferred.defer({.peer = Peer(call.peer),
                  .header = call.header,
                  .hashes = std::move(hashes),
                  .parameters = std::move(parameters),
                  .reply_bytes = reply_bytes,
                  .received_ns = call.received_ns});
  metrics_.deferred_peak = std::max(metrics_.deferred_peak, deferred.size());
  send(call, Status::kDeferred);
}

void Service::answer(const Call& call, Table& table) {
  if (call.header.worker != wire::kAnonymous && call.header.op == Op::kPull) {
    view(call) = {.pushes = table.pushes, .own = 0};
    const std::uint32_t slowest = arcs_.empty() ? 0 : state(*arcs_.front(), call.header.job).clocks.slowest();
    metrics_.pull_staleness.add(call.header.clock > slowest ? call.header.clock - slowest : 0);
  }
  switch (call.header.op) {
    case Op::kPull:
      return answer_pull(call, table);
    case Op::kContains:
      return answer_contains(call);
    case Op::kState:
      return answer_state(call, table);
    case Op::kPrefetch:
      return answer_prefetch(call);
    case Op::kSlot:
      return answer_slot(call);
    case Op::kSection:
      return answer_section(call);
    case Op::kReduce:
    case Op::kSweep:
      return answer_function(call);
    default:
      return answer_stats(call);
  }
}

template <class Use>
void Service::each_slice(const Call& call, const Use& use) {
  for (const Slice& slice : slices_) {
    const SlotSlices part = slice.arc->cut(call.hashes.subspan(slice.begin, slice.count));
    in_shard(call.received_ns, [&] { use(*slice.arc->find(call.header.table)->shard, part, slice.begin); });
  }
}

void Service::answer_pull(const Call& call, Table& table) {
  const std::size_t dim = width_of(call, table);
  PooledBuffer values = call.out.acquire(call.hashes.size() * dim * sizeof(float));
  each_slice(call, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    const std::span<float> rows = values.as<float>().subspan(begin * dim, part.hashes.size() * dim);
    if (is_whole(call)) {
      shard.pull_whole(part, rows, &workspace_.shard);
    } else {
      shard.pull(part, rows, nullptr, &workspace_.shard);
    }
  });
  send_weights(call, std::move(values), dim);
}

// The number of clocks all of whose pushes the rows of slices_ include under SSP.
std::uint32_t Service::included(std::uint32_t job) const noexcept {
  std::uint32_t clocks = ~std::uint32_t{0};
  for (const Slice& slice : slices_) {
    if (const JobState* const its = slice.arc->find_job(job); its != nullptr) {
      clocks = std::min(clocks, its->mode == Mode::kBsp ? its->applied : its->clocks.floor());
    }
  }
  return slices_.empty() ? 0 : clocks;
}

// Sends weights as requested: in 16 bits, without their zeros.
void Service::send_weights(const Call& call, PooledBuffer values, std::size_t dim) {
  Header header{.dtype = wire::Dtype::kFloat32,
                .dim = static_cast<std::uint16_t>(dim),
                .count = count_of(call.hashes.size())};
  header.flags = call.header.flags & wire::kWhole;
  if ((call.header.flags & wire::kDated) != 0) {
    header.flags |= wire::kDated;
    header.clock = included(call.header.worker == wire::kAnonymous ? kDefaultJob : call.header.job);
  }
  const std::size_t size = call.hashes.size() * dim;
  const std::size_t plain = values.size();
  if (call.header.dtype != wire::Dtype::kFloat32) {
    header.dtype = call.header.dtype;
    const Dtype dtype = header.dtype == wire::Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;
    const std::uint64_t who = (std::uint64_t{call.header.worker} << 32U) | call.header.incarnation;
    PooledBuffer halves = call.out.acquire(size * sizeof(std::uint16_t));
    narrow(values.as<float>(), call.hashes, dim, dtype, who, call.header.sequence, halves.as<std::uint16_t>(),
           metrics_.narrowed);
    values = std::move(halves);
  }
  const auto packed = [&]<class Word>(std::span<const Word> words) {
    const std::size_t kept = count_nonzero(words) * sizeof(Word);
    if (map_bytes(size) + kept >= values.size()) {
      return false;
    }
    PooledBuffer map = call.out.acquire(map_bytes(size));
    PooledBuffer some = call.out.acquire(kept);
    pack(words, map.bytes(), some.as<Word>());
    metrics_.weight_bytes_saved += plain - map.size() - some.size();
    header.flags |= wire::kPacked;
    send(call, header, 2, std::move(map), std::move(some));
    return true;
  };
  if ((call.header.flags & wire::kPacked) != 0) {
    const bool sent = header.dtype == wire::Dtype::kFloat32
                          ? packed(std::span<const float>(values.as<float>()))
                          : packed(std::span<const std::uint16_t>(values.as<std::uint16_t>()));
    if (sent) {
      return;
    }
  }
  metrics_.weight_bytes_saved += plain - values.size();
  send(call, header, 1, std::move(values));
}

void Service::answer_contains(const Call& call) {
  PooledBuffer there = call.out.acquire(call.hashes.size());
  each_slice(call, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    shard.contains(part, there.as<std::uint8_t>().subspan(begin, part.hashes.size()));
  });
  send(call, {.dtype = wire::Dtype::kUint8, .count = count_of(call.hashes.size())}, 1, std::move(there));
}

std::vector<std::int64_t> Service::peek(std::uint32_t id, std::span<const std::uint64_t> hashes) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> numbers;
  std::vector<float> row;
  for (const std::uint64_t hash : hashes) {
    const std::size_t slot = index_of(slots_.of(hash));
    const Arc::Table* const table = serves(slot) ? arc_of(slot)->find(id) : nullptr;
    if (table == nullptr || table->shard->spec().optimizer.elements() != Elements::kInt64Pairs) {
      return {};
    }
    row.resize(table->shard->rows().dim());
    table->shard->state(arc_of(slot)->cut({&hash, 1}), 0, row);
    for (std::size_t e = 0; e < row.size(); e += kInt64Floats) {
      numbers.push_back(static_cast<std::int64_t>(load_int64(&row[e])));
    }
  }
  return numbers;
}

void Service::answer_prefetch(const Call& call) {
  bool reads = false;
  each_slice(call, [&](const Shard& shard, const SlotSlices& part, std::size_t /*begin*/) {
    reads = shard.prefetch(part) || reads;
  });
  send(call, Header{.aux = reads ? 1U : 0U});
}

void Service::answer_state(const Call& call, Table& table) {
  const std::size_t column = call.header.aux;
  const std::size_t dim = column == table.rows.columns() ? 1 : table.rows.dim();
  PooledBuffer values = call.out.acquire(call.hashes.size() * dim * sizeof(float));
  each_slice(call, [&](const Shard& shard, const SlotSlices& part, std::size_t begin) {
    shard.state(part, column, values.as<float>().subspan(begin * dim, part.hashes.size() * dim));
  });
  send(call,
       {.dtype = wire::Dtype::kFloat32,
        .dim = static_cast<std::uint16_t>(dim),
        .count = count_of(call.hashes.size()),
        .aux = call.header.aux},
       1, std::move(values));
}

const Shard& Service::shard_of(const Call& call) const {
  return *arc_of(call.header.aux)->find(call.header.table)->shard;
}

void Service::answer_slot(const Call& call) {
  const Shard& shard = shard_of(call);
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  shard.read_slot(Slot{call.header.aux}, hashes, weights);
  const std::size_t bytes = hashes.size() * sizeof(std::uint64_t) + weights.size() * sizeof(float);
  if (bytes > limits_.reply_bytes) {
    return send_text(call, Status::kBadRequest,
                     "slot " + std::to_string(call.header.aux) + " has " + std::to_string(bytes) +
                         " bytes, at most " + std::to_string(limits_.reply_bytes) +
                         " are sent: use more slots");
  }
  PooledBuffer first = call.out.acquire(hashes.size() * sizeof(std::uint64_t));
  PooledBuffer second = call.out.acquire(weights.size() * sizeof(float));
  std::ranges::copy(hashes, first.as<std::uint64_t>().begin());
  std::ranges::copy(weights, second.as<float>().begin());
  send(call,
       {.dtype = wire::Dtype::kFloat32,
        .dim = static_cast<std::uint16_t>(shard.rows().dim()),
        .count = count_of(hashes.size()),
        .aux = call.header.aux},
       2, std::move(first), std::move(second));
}

void Service::answer_section(const Call& call) {
  const Shard& shard = shard_of(call);
  std::vector<std::byte> bytes;
  const std::size_t rows = shard.section(Slot{call.header.aux}, bytes);
  std::vector<std::byte> filter;
  shard.filter(Slot{call.header.aux}, filter);
  bytes.insert(bytes.end(), filter.begin(), filter.end());
  if (bytes.size() > limits_.reply_bytes) {
    return send_text(call, Status::kBadRequest,
                     "the section of slot " + std::to_string(call.header.aux) + " has " +
                         std::to_string(bytes.size()) + " bytes, at most " +
                         std::to_string(limits_.reply_bytes) + " are sent: use more slots");
  }
  PooledBuffer block = call.out.acquire(bytes.size());
  std::ranges::copy(bytes, block.bytes().begin());
  send(call, {.dtype = wire::Dtype::kUint8, .count = count_of(rows), .aux = count_of(filter.size())}, 1,
       std::move(block));
}

void Service::answer_stats(const Call& call) {
  // The step, the statistics of the shards, how many arcs have a tier, their statistics, and the table's clock.
  std::vector<std::uint64_t> numbers(1 + kShardStatistics.size() + 1 + kTierStatistics.size() + 1);
  std::uint64_t& step = numbers.front();
  std::uint64_t* const shards = numbers.data() + 1;
  std::uint64_t* const tiers = shards + kShardStatistics.size();
  std::uint64_t& clock = numbers.back();
  for (const auto& arc : arcs_) {
    const Shard& shard = *arc->find(call.header.table)->shard;
    step = std::max(step, shard.step());
    clock = std::max<std::uint64_t>(
        clock, shard.table_clock(arc->store_clock(call.header.job, call.header.table, call.header.clock)));
    const ShardStats stats = shard.stats();
    for (std::size_t i = 0; i < kShardStatistics.size(); ++i) {
      const std::uint64_t number = kShardStatistics[i].of(stats);
      shards[i] = kShardStatistics[i].is_of_greatest ? std::max(shards[i], number) : shards[i] + number;
    }
    if (const auto tier = shard.tier_stats(); tier.has_value()) {
      ++tiers[0];
      for (std::size_t i = 0; i < kTierStatistics.size(); ++i) {
        tiers[1 + i] += kTierStatistics[i].of(*tier);
      }
    }
  }
  send_words(call, numbers);
}

bool Service::begin_scan(const Call& call) {
  constexpr std::size_t kFewRows = std::size_t{1} << 16U;  // less than a millisecond
  const Header& header = call.header;
  const bool is_of_a_clock = header.worker != wire::kAnonymous && mode(header.job) == Mode::kBsp;
  const Function function{header.aux};
  if (replays() || is_of_a_clock || (header.op == Op::kReduce && function == Function::kMap)) {
    return false;
  }
  if (scans_.has(header, call.peer)) {
    send(call, Status::kDeferred);
    return true;
  }
  struct Part {
    std::shared_ptr<Shard> shard;  // it may outlive the table
    std::size_t first;
    std::size_t end;
    std::uint32_t clock;
  };
  std::vector<Part> parts;
  std::size_t rows = 0;
  for (const Served& served : served_) {
    const auto& shard = served.arc->find(header.table)->shard;
    parts.push_back(
        {shard, served.first, served.end, served.arc->store_clock(header.job, header.table, header.clock)});
    rows += shard->size();
  }
  if (rows <= kFewRows) {
    return false;
  }
  const auto given = doubles_of(call);
  const auto work = [parts = std::move(parts), parameters = std::vector<double>(given.begin(), given.end()),
                     function](Scan& scan) {
    if (scan.header.op == Op::kReduce) {
      std::vector<std::vector<double>> found;
      for (const Part& part : parts) {
        found.push_back(reduce(*part.shard, function, parameters, part.first, part.end));
      }
      scan.numbers = join(function, parameters, found);
      return;
    }
    const auto rules = Lifecycle::expiries(parameters);
    for (const Part& part : parts) {
      add_words(scan.words, part.shard->sweep(part.first, part.end, part.clock, rules, true));
    }
  };
  const bool is_begun =
      scans_.add({.peer = Peer(call.peer), .header = header, .received_ns = call.received_ns, .work = work});
  send(call, is_begun ? Status::kDeferred : Status::kOverloaded);
  return true;
}

void Service::finish_scan(const Scan& scan) noexcept {
  const std::lock_guard lock(mutex_);
  const Call call{scan.peer, scan.header, {}, {}, {}, {}, released_, nullptr, scan.received_ns};
  try {
    if (scan.failure != nullptr) {
      std::rethrow_exception(scan.failure);
    }
    if (check_epoch(call)) {
      scan.header.op == Op::kReduce ? send_numbers(call, scan.numbers) : send_words(call, scan.words);
    }
  } catch (const std::exception& error) {
    fail(call, error);
  }
  if (waker_ && !released_.replies().empty()) {
    waker_();
  }
}

void Service::answer_function(const Call& call) {
  if (begin_scan(call)) {
    return;
  }
  const Header& header = call.header;
  FunctionAnswer computed;
  FunctionAnswer* last = &computed;
  if (header.worker != wire::kAnonymous) {  // readers share this rank
    auto& answers = job_of(call).functions;
    if (header.worker >= answers.size()) {
      answers.resize(header.worker + std::size_t{1});
    }
    if (answers[header.worker] == nullptr) {
      answers[header.worker] = std::make_unique<FunctionAnswer>();
    }
    last = answers[header.worker].get();
  }
  const auto name = [](const Header& of) {
    return std::tuple(of.incarnation, of.sequence, of.epoch, of.op, of.table, of.aux);
  };
  if (header.sequence == 0 || name(last->request) != name(header)) {
    *last = {};
    if (header.op == Op::kReduce) {
      last->numbers = reduced(call);
    } else {
      last->words = swept(call);
    }
    last->request = header;
  }
  header.op == Op::kReduce ? send_numbers(call, last->numbers) : send_words(call, last->words);
  const std::size_t bytes =
      last->numbers.size() * sizeof(double) + last->words.size() * sizeof(std::uint64_t);
  if (bytes > kMaxFunctionBytes) {
    *last = {};
  }
}

std::vector<double> Service::reduced(const Call& call) {
  const Function function{call.header.aux};
  std::vector<std::vector<double>> parts;
  for (const Served& served : served_) {
    parts.push_back(reduce(*served.arc->find(call.header.table)->shard, function, doubles_of(call),
                           served.first, served.end));
  }
  return join(function, doubles_of(call), parts);
}

std::vector<std::uint64_t> Service::swept(const Call& call) {
  const auto rules = Lifecycle::expiries(doubles_of(call));
  std::vector<std::uint64_t> sums;
  for (const Served& served : served_) {
    const Arc& arc = *served.arc;
    const std::uint32_t clock = arc.store_clock(call.header.job, call.header.table, call.header.clock);
    add_words(sums, arc.find(call.header.table)->shard->sweep(served.first, served.end, clock, rules, true));
  }
  return sums;
}

void Service::add_words(std::vector<std::uint64_t>& sums, std::span<const std::uint64_t> words) {
  sums.resize(std::max(sums.size(), words.size()));
  std::ranges::transform(words, sums, sums.begin(), std::plus<>());
}

void Service::send_words(const Call& call, std::span<const std::uint64_t> words) {
  PooledBuffer block = call.out.acquire(words.size_bytes());
  std::ranges::copy(words, block.as<std::uint64_t>().begin());
  send(call, {.count = count_of(words.size())}, 1, std::move(block));
}

void Service::send_numbers(const Call& call, std::span<const double> numbers) {
  PooledBuffer block = call.out.acquire(numbers.size_bytes());
  std::ranges::copy(numbers, block.as<double>().begin());
  send(call, {.dtype = wire::Dtype::kFloat64, .count = count_of(numbers.size()), .aux = call.header.aux}, 1,
       std::move(block));
}

}  // namespace shoal
