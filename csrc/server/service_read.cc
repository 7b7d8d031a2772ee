// Service: reads, which may wait for their clock.

#include <algorithm>
#include <array>
#include <string>
#include <utility>

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
  const Rows& rows = table.shard->rows();
  switch (call.header.op) {
    case Op::kPull:
      return call.hashes.size() * rows.dim() * sizeof(float);
    case Op::kContains:
      return call.hashes.size();
    case Op::kState:
      return call.hashes.size() * (call.header.aux == rows.columns() ? 1 : rows.dim()) * sizeof(float);
    default:
      return 0;  // known only once it is made
  }
}

void Service::find_refused(const Header& header, std::span<const std::uint64_t> hashes) {
  std::size_t place = 0;
  own(hashes, place);
  if (is_of_one_slot(header.op) && !owns(header.aux)) {
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
  if (header.op == Op::kPull && !table.full.empty()) {
    return send_text(call, Status::kResourceExhausted, table.full);
  }
  const std::size_t bytes = reply_bytes(call, table);
  if (bytes > limits_.reply_bytes) {
    return send_text(call, Status::kBadRequest,
                     "the reply would have " + std::to_string(bytes) + " bytes, at most " +
                         std::to_string(limits_.reply_bytes) + " are sent: ask for fewer keys at a time");
  }
  if (header.worker != wire::kAnonymous) {
    if (mode_ == Mode::kBsp && header.op == Op::kPull && header.clock < applied_) {
      return send_text(call, Status::kBadRequest,
                       "a pull at clock " + std::to_string(header.clock) +
                           " came after the pushes of clock " + std::to_string(applied_ - 1) +
                           " were applied: tick a clock when its pulls are answered");
    }
    if (!is_complete(header.clock)) {
      return defer(call, bytes);
    }
  }
  answer(call, table);
}

void Service::defer(const Call& call, std::size_t reply_bytes) {
  const std::size_t bytes = call.hashes.size_bytes() + call.bytes.size() + reply_bytes;
  const bool full =
      deferred_.size() >= limits_.deferred_reads || deferred_.bytes() + bytes > limits_.deferred_bytes;
  if (full && !deferred_.has(call.header)) {
    return send(call, Status::kOverloaded);
  }
  PooledBuffer hashes = buffers_.acquire(call.hashes.size_bytes());
  std::ranges::copy(call.hashes, hashes.as<std::uint64_t>().begin());
  PooledBuffer parameters = buffers_.acquire(call.bytes.size());
  std::ranges::copy(call.bytes, parameters.bytes().begin());
  deferred_.defer({.peer = Peer(call.peer),
                   .header = call.header,
                   .hashes = std::move(hashes),
                   .parameters = std::move(parameters),
                   .reply_bytes = reply_bytes});
  metrics_.deferred_peak = std::max(metrics_.deferred_peak, deferred_.size());
  send(call, Status::kDeferred);
}

void Service::answer(const Call& call, Table& table) {
  if (call.header.worker != wire::kAnonymous && call.header.op == Op::kPull) {
    View& last = view(table, call.header.worker);
    last = {.pushes = table.pushes, .own = 0};
    const std::uint32_t slowest = clocks_.slowest();
    metrics_.pull_staleness.add(call.header.clock > slowest ? call.header.clock - slowest : 0);
  }
  switch (call.header.op) {
    case Op::kPull:
      return answer_pull(call, table);
    case Op::kContains:
      return answer_contains(call, table);
    case Op::kState:
      return answer_state(call, table);
    case Op::kSlot:
      return answer_slot(call, table);
    case Op::kSection:
      return answer_section(call, table);
    case Op::kReduce:
      return send_numbers(
          call, reduce(*table.shard, Function{call.header.aux}, doubles_of(call), first_slot_, end_slot_));
    case Op::kSweep:
      return send_words(call, swept(call, table, true));
    default:
      return answer_stats(call, table);
  }
}

void Service::answer_pull(const Call& call, Table& table) {
  const std::size_t n = call.hashes.size();
  const std::size_t dim = table.shard->rows().dim();
  PooledBuffer values = call.out.acquire(n * dim * sizeof(float));
  table.shard->pull(cut(call.hashes), values.as<float>());
  send_weights(call, std::move(values), dim);
}

// Sends weights as requested: in 16 bits, without their zeros.
void Service::send_weights(const Call& call, PooledBuffer values, std::size_t dim) {
  Header header{.dtype = wire::Dtype::kFloat32,
                .dim = static_cast<std::uint16_t>(dim),
                .count = count_of(call.hashes.size())};
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
    header.flags = wire::kPacked;
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

void Service::answer_contains(const Call& call, Table& table) {
  PooledBuffer there = call.out.acquire(call.hashes.size());
  table.shard->contains(cut(call.hashes), there.as<std::uint8_t>());
  send(call, {.dtype = wire::Dtype::kUint8, .count = count_of(call.hashes.size())}, 1, std::move(there));
}

void Service::answer_state(const Call& call, Table& table) {
  const Rows& rows = table.shard->rows();
  const std::size_t column = call.header.aux;
  const std::size_t dim = column == rows.columns() ? 1 : rows.dim();
  PooledBuffer values = call.out.acquire(call.hashes.size() * dim * sizeof(float));
  table.shard->state(cut(call.hashes), column, values.as<float>());
  send(call,
       {.dtype = wire::Dtype::kFloat32,
        .dim = static_cast<std::uint16_t>(dim),
        .count = count_of(call.hashes.size()),
        .aux = call.header.aux},
       1, std::move(values));
}

void Service::answer_slot(const Call& call, Table& table) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  table.shard->read_slot(Slot{call.header.aux}, hashes, weights);
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
        .dim = static_cast<std::uint16_t>(table.shard->rows().dim()),
        .count = count_of(hashes.size()),
        .aux = call.header.aux},
       2, std::move(first), std::move(second));
}

void Service::answer_section(const Call& call, Table& table) {
  std::vector<std::byte> bytes;
  const std::size_t rows = table.shard->section(Slot{call.header.aux}, bytes);
  std::vector<std::byte> filter;
  table.shard->filter(Slot{call.header.aux}, filter);
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

void Service::answer_stats(const Call& call, Table& table) {
  const ShardStats stats = table.shard->stats();
  std::vector<std::uint64_t> numbers = {
      table.shard->step(),  stats.rows,        stats.cells,       stats.bytes,        stats.pulls,
      stats.pushes,         stats.rows_pulled, stats.rows_pushed, stats.rows_created, stats.rows_erased,
      stats.nonfinite_rows, stats.refused,     stats.waiting};
  numbers.insert(numbers.end(), stats.expired.begin(), stats.expired.end());
  numbers.push_back(table.shard->table_clock(call.header.clock));
  send_words(call, numbers);
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
