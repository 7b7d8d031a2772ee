// What is left when an allocation fails, each in turn: no arc is lost, nothing aborts, and the call can be
// made again.

#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "arcs.h"
#include "check.h"
#include "endpoint/endpoint.h"
#include "failing_memory.h"
#include "orders.h"

namespace shoal::failing_memory_test {
namespace {

constexpr std::uint32_t kJob = 9;
constexpr std::uint32_t kTable = 3;
constexpr std::size_t kSlots = 16;
constexpr StreamId kStream = 1;
const std::vector<SlotRange> kArcs{{0, 4}, {4, 8}, {8, 12}, {12, 16}};

using Bytes = std::vector<std::byte>;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

TableSpec spec(std::size_t dim = 1) {
  return {.dim = dim,
          .dtype = Dtype::kFloat32,
          .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
          .init = Init("Constant", 0.0, 0),
          .seed = 0,
          .lifecycle = Lifecycle({}, {{"TimeToLive", {{"clocks", 3}}}})};
}

// Whether the call used up `allocations`, so that one of them failed.
template <class Call>
bool runs_out(long allocations, const Call& call) {
  check::allocations_left = allocations;
  try {
    call();
  } catch (const std::bad_alloc&) {
    CHECK(check::allocations_left < 0);
  }
  const bool failed = check::allocations_left < 0;
  check::allocations_left = -1;
  return failed;
}

// Calls attempt(n), in which allocation n fails, until all succeed.
template <class Attempt>
void with_each_allocation(const Attempt& attempt) {
  long n = 0;
  while (attempt(n)) {
    ++n;
  }
  CHECK(n > 0);
}

template <class Target>
std::vector<wire::Header> send(Target& target, BufferPool& pool, wire::Header header,
                               const std::vector<Bytes>& payload) {
  header.job = kJob;
  header.incarnation = 1;
  header.epoch = 1000;
  std::vector<wire::Frame> frames(payload.begin(), payload.end());
  std::array<std::byte, sizeof(header)> head;
  wire::encode(header, frames, head);
  frames.insert(frames.begin(), head);
  ReplyQueue out(pool);
  target.handle("worker", frames, out);
  std::vector<wire::Header> replies;
  for (const Reply& reply : out.replies()) {
    std::memcpy(&replies.emplace_back(), reply.header.data(), sizeof(wire::Header));
  }
  return replies;
}

std::size_t rows_of(const Endpoint& service, const SlotRange& arc) {
  ArcRestorer restorer;
  for (const auto& piece : service.save_arc(arc)) {
    restorer.add(piece);
  }
  return restorer.finish()->find(kTable)->shard->size();
}

// A primary of all arcs but the first, and its backup, which has the first one itself. Each slot has a row.
class Pair {
 public:
  Pair() : primary(Slots(kSlots), {kArcs.begin() + 1, kArcs.end()}), backup(Slots(kSlots), {kArcs.front()}) {
    const std::vector<SlotRange> given(kArcs.begin() + 1, kArcs.end());
    primary.assign({.epoch = 1, .primary = given, .outgoing = {{.stream = kStream, .in_sync = given}}});
    backup.assign(
        {.epoch = 1, .primary = {kArcs.front()}, .incoming = {{.stream = kStream, .in_sync = given}}});
    for (Endpoint* service : {&primary, &backup}) {
      add_table(*service, kTable, spec());
      start_job(*service, kJob, Mode::kAsp, 0, false);
      admit(*service, 0, 1, 0);
      push(*service);
    }
    pump();
    CHECK(primary.committed(primary.position()));
  }

  void push(Endpoint& service) {
    std::vector<std::uint64_t> hashes;
    for (std::uint64_t slot = 0; slot < kSlots; ++slot) {
      hashes.push_back((slot << 60U) | 5U);
    }
    send(service, pool,
         {.op = wire::Op::kPush,
          .dtype = wire::Dtype::kFloat32,
          .dim = 1,
          .table = kTable,
          .worker = 0,
          .sequence = ++sequence,
          .count = kSlots},
         {bytes_of(hashes), bytes_of(std::vector<float>(kSlots, 1.0F))});
  }

  void pump() {
    StreamMessage message;
    while (primary.next_message(kStream, message)) {
      std::vector<wire::Frame> frames{message.header};
      for (std::size_t i = 0; i < message.count; ++i) {
        frames.push_back(message.frames.at(i).bytes);
      }
      ReplyQueue out(pool);
      backup.handle("primary", frames, out);
      backup.acknowledge(out);
      ReplyQueue released(pool);
      for (const Reply& reply : out.replies()) {
        primary.handle_backup(kStream, std::array{wire::Frame(reply.header)}, released);
      }
    }
  }

  // The first slots of the arcs that execute records, or are set aside, at the backup.
  std::vector<std::size_t> copies() const {
    std::vector<std::size_t> first_slots;
    for (const auto& [first_slot, stamp] : backup.stamps()) {
      first_slots.push_back(first_slot);
    }
    return first_slots;
  }

  BufferPool pool;
  std::uint64_t sequence = 0;
  Endpoint primary;
  Endpoint backup;
};

const std::vector<std::size_t> kCopies{4, 8, 12};

// Its primary has died: it serves two of the arcs, becomes the backup of another server for one of them and
// one of its own, and drops one. Its own one leaves.
Assignment takeover() {
  return {.epoch = 7,
          .primary = {kArcs[1], kArcs[2]},
          .outgoing = {{.stream = 2, .address = "inproc://b", .in_sync = {kArcs[1]}, .arriving = {kArcs[2]}}},
          .incoming = {{.stream = 3, .in_sync = {kArcs[0]}}, {.stream = 4, .in_sync = {}}}};
}

TEST(an_assignment_that_ran_out_of_memory_is_carried_out_again_with_all_arcs) {
  with_each_allocation([](long n) {
    Pair pair;
    const bool failed = runs_out(n, [&] { pair.backup.assign(takeover()); });
    pair.backup.assign(takeover());
    CHECK_EQ(rows_of(pair.backup, kArcs[1]), 4);
    CHECK_EQ(rows_of(pair.backup, kArcs[2]), 4);
    CHECK_EQ(pair.copies(), std::vector<std::size_t>{0});
    const auto status = pair.backup.replication();
    CHECK_EQ(status.streams.size(), 1);
    CHECK(failed || status.streams[0].fault.empty());
    return failed;
  });
}

TEST(an_order_that_fails_at_the_copies_of_a_dead_primary_leaves_them_with_all_rows) {
  with_each_allocation([](long n) {
    Pair pair;
    const std::vector<SlotRange> promoted{kArcs[1], kArcs[2]};
    const TableSpec added = spec(3);
    // Others are set aside already.
    pair.backup.apply_to_follower(kStream, std::array{kArcs[2], kArcs[3]}, EndJob{kJob + 1});
    const bool failed = runs_out(
        n, [&] { pair.backup.apply_to_follower(kStream, promoted, AddTable{.id = 5, .spec = added}); });
    CHECK_EQ(pair.copies(), kCopies);
    pair.backup.assign(takeover());
    CHECK_EQ(rows_of(pair.backup, kArcs[1]), 4);
    CHECK_EQ(rows_of(pair.backup, kArcs[2]), 4);
    return failed;
  });
}

TEST(an_order_that_the_copies_of_a_dead_primary_refuse_is_not_kept_for_other_copies) {
  Pair pair;
  const std::vector<SlotRange> promoted{kArcs[1], kArcs[2]};
  const auto before = pair.backup.stamps();
  CHECK_THROWS(pair.backup.apply_to_follower(kStream, promoted, AddTable{.id = kTable, .spec = spec(7)}),
               "there is a table 3 already");
  CHECK(pair.backup.stamps() == before);
  pair.backup.apply_to_follower(kStream, promoted, DropTable{.id = kTable});
  CHECK(pair.backup.stamps() != before);
}

TEST(a_pool_whose_threads_cannot_all_start_ends_those_that_did) {
  with_each_allocation([](long n) {
    return runs_out(n, [] {
      ThreadPool pool(4);
      std::atomic<std::size_t> parts = 0;
      pool.run(8, [&](std::size_t) { ++parts; });
      CHECK_EQ(parts.load(), 8);
    });
  });
  with_each_allocation([](long n) { return runs_out(n, [] { Thread([] {}).join(); }); });
}

TEST(arcs_that_were_not_adopted_for_want_of_memory_stay) {
  with_each_allocation([](long n) {
    Service from(Slots(kSlots), kArcs);
    add_table(from, kTable, spec());
    start_job(from, kJob, Mode::kAsp, 0, false);
    start_job(from, kJob + 1, Mode::kAsp, 0, false, 0, true);
    Service to(Slots(kSlots), {});
    auto arcs = take_arcs(from, kArcs);
    const bool failed = runs_out(n, [&] { to.adopt(arcs); });
    if (arcs.front() != nullptr) {
      CHECK(to.arcs().empty());
      CHECK(to.tables().empty());
      to.adopt(arcs);
    }
    CHECK_EQ(to.arcs().size(), kArcs.size());
    CHECK_EQ(to.metrics().jobs.size(), 1);
    return failed;
  });
}

TEST(a_tick_that_releases_what_waited_for_it_survives_the_failure_of_any_allocation) {
  with_each_allocation([](long n) {
    BufferPool pool;
    Service service(Slots(kSlots), kArcs);
    service.set_map(1, kArcs);
    add_table(service, kTable, spec());
    start_job(service, kJob, Mode::kBsp, 0, false);
    admit(service, 0, 1, 0);
    admit(service, 1, 1, 0);
    service.track_released(true);
    const wire::Header tick{.op = wire::Op::kTick, .worker = 0, .sequence = 1};
    const std::vector<Bytes> empty{{}, {}};
    CHECK(send(service, pool, tick, empty).at(0).status == wire::Status::kOk);
    const wire::Header sweep{.op = wire::Op::kSweep,
                             .dtype = wire::Dtype::kFloat64,
                             .table = kTable,
                             .worker = 0,
                             .sequence = 2,
                             .clock = 1};
    CHECK(send(service, pool, sweep, {{}}).at(0).status == wire::Status::kDeferred);
    wire::Header last = tick;
    last.worker = 1;
    const bool failed = runs_out(n, [&] { send(service, pool, last, empty); });
    const auto writes = service.take_released();
    CHECK(failed || writes.size() == 1);
    CHECK(writes.empty() || writes[0].changed.size() == kArcs.size() || failed);
    send(service, pool, last, empty);  // as a worker that got no reply does
    send(service, pool, sweep, {{}});
    CHECK_EQ(service.metrics().applied, 1);
    return failed;
  });
}

}  // namespace
}  // namespace shoal::failing_memory_test
