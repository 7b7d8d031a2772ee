// Service compared with a map of weights: split, repeated, refused and concurrent requests, and exhausted
// memory. tests/cluster/server/test_service.py has its rules one by one.

#include "endpoint/service.h"
#include "endpoint/endpoint.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "arcs.h"
#include "base/int64_pairs.h"
#include "base/threads.h"
#include "check.h"
#include "orders.h"

namespace shoal::service_test {
using wire::Header;
using wire::Op;
using wire::Status;

namespace {

constexpr std::uint32_t kJob = 77;

TableSpec sgd(std::size_t dim) {
  return {dim, Dtype::kFloat32, Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}), Init("Zeros", 0, 0),
          0};
}

// What answers requests: a Service, or an Endpoint, which several threads may use.
class Served {
 public:
  Served(Service& service) : handle([&service](auto&&... of) { service.handle(of...); }) {}
  Served(Endpoint& endpoint) : handle([&endpoint](auto&&... of) { endpoint.handle(of...); }) {}

  std::function<void(std::string_view, std::span<const wire::Frame>, ReplyQueue&)> handle;
};

// A worker with its service, and the replies.
struct Peer1 {
  Served service;
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 1;
  std::uint32_t epoch = 0;
  std::uint32_t job = kJob;
  BufferPool pool{};

  struct Back {
    Header header;
    std::vector<float> values;
    std::vector<std::uint16_t> slots;
    std::string text;
  };

  std::vector<Back> send(Header header, std::span<const wire::Frame> payload) {
    header.worker = rank;
    header.incarnation = incarnation;
    header.job = job;
    header.epoch = epoch;
    std::array<std::byte, sizeof(Header)> head;
    wire::encode(header, payload, head);
    std::vector<wire::Frame> frames{head};
    frames.insert(frames.end(), payload.begin(), payload.end());
    ReplyQueue out(pool);
    service.handle("peer", frames, out);
    return read(out);
  }

  static std::vector<Back> read(ReplyQueue& out) {
    std::vector<Back> all;
    wire::Decoded decoded;
    for (Reply& reply : out.replies()) {
      std::vector<wire::Frame> frames{reply.header};
      for (std::size_t i = 0; i < reply.frames; ++i) {
        frames.push_back(reply.payload.at(i).bytes());
      }
      const auto fault =
          wire::decode(frames, {.payload_bytes = std::uint64_t{1} << 31U, .replies = true}, decoded);
      CHECK_EQ(std::string(fault.message()), "");
      const auto floats = decoded.floats();
      all.push_back({decoded.header,
                     {floats.begin(), floats.end()},
                     {decoded.slots.begin(), decoded.slots.end()},
                     std::string(decoded.text)});
    }
    return all;
  }

  Back one(Header header, std::span<const wire::Frame> payload) {
    const auto all = send(header, payload);
    CHECK_EQ(all.size(), 1);
    return all.front();
  }

  Back write(Op op, std::uint64_t sequence, const std::vector<std::uint64_t>& hashes,
             const std::vector<float>& rows, std::uint32_t clock = 0) {
    const std::array<wire::Frame, 2> payload{std::as_bytes(std::span(hashes)),
                                             std::as_bytes(std::span(rows))};
    return one({.op = op,
                .dtype = wire::Dtype::kFloat32,
                .dim = static_cast<std::uint16_t>(hashes.empty() ? 1 : rows.size() / hashes.size()),
                .sequence = sequence,
                .clock = clock,
                .count = static_cast<std::uint32_t>(hashes.size())},
               payload);
  }

  // A request whose payload is numbers: hashes, or what an operation of a save or a load names.
  Back numbers(Op op, std::uint64_t sequence, const std::vector<std::uint64_t>& given) {
    const std::array<wire::Frame, 1> payload{std::as_bytes(std::span(given))};
    return one({.op = op, .sequence = sequence, .count = static_cast<std::uint32_t>(given.size())}, payload);
  }

  Back erase(std::uint64_t sequence, const std::vector<std::uint64_t>& hashes) {
    return numbers(Op::kErase, sequence, hashes);
  }

  Back pull(const std::vector<std::uint64_t>& hashes, std::uint32_t clock = 0) {
    const std::array<wire::Frame, 1> payload{std::as_bytes(std::span(hashes))};
    return one({.op = Op::kPull,
                .dtype = wire::Dtype::kFloat32,
                .sequence = std::uint64_t{1} << 63U,
                .clock = clock,
                .count = static_cast<std::uint32_t>(hashes.size())},
               payload);
  }

  std::vector<Back> tick(std::uint32_t clock, const std::vector<std::uint64_t>& named = {}) {
    const std::array<std::uint32_t, 1> tables{0};
    const std::array<wire::Frame, 2> payload{std::as_bytes(std::span(named)),
                                             std::as_bytes(std::span(tables))};
    return send({.op = Op::kTick,
                 .sequence = std::uint64_t{1} << 63U,
                 .clock = clock,
                 .count = static_cast<std::uint32_t>(named.size()),
                 .aux = 1},
                payload);
  }
};

std::vector<std::uint64_t> random_hashes(std::mt19937_64& random, std::size_t n, std::uint64_t distinct) {
  std::set<std::uint64_t> hashes;
  for (std::size_t i = 0; i < n; ++i) {
    hashes.insert(mix(random() % distinct));
  }
  return {hashes.begin(), hashes.end()};
}

}  // namespace

TEST(any_cut_of_any_batch_reaches_each_slot_once) {
  std::mt19937_64 random(3);
  for (const std::size_t count : {2U, 16U, 1024U}) {
    const Slots slots(count);
    std::vector<SlotRange> arcs;
    for (std::size_t first = 0; first < count; first += count / 2) {
      arcs.push_back({first, first + count / 2});
    }
    Service service(slots, arcs);
    add_table(service, 0, sgd(2));
    start_job(service, kJob, Mode::kAsp, 0, false);
    admit(service, 0, 1, 0);
    Peer1 peer{service};
    Peer1 anonymous{service, wire::kAnonymous, 0};
    std::map<std::uint64_t, float> weights;
    std::map<std::uint64_t, std::set<std::uint64_t>> seen;  // slot -> sequences
    std::uint64_t newest = 1;
    std::uint32_t epoch = 0;
    std::size_t first = 0;
    std::size_t end = count;
    for (int i = 0; i < 400; ++i) {
      if (random() % 3 == 0) {
        first = random() % 2 == 0 ? 0 : random() % count;
        end = random() % 2 == 0 ? count : first + random() % (count - first + 1);
        service.set_map(++epoch, {{first, end}});
      }
      // Of all sizes; sometimes all in a few slots; an older number again now and then, with other keys.
      auto hashes = random_hashes(random, random() % 8 == 0 ? 5000 : random() % 40, 300 + random() % 5000);
      if (random() % 5 == 0) {
        std::ranges::for_each(hashes, [](std::uint64_t& hash) { hash >>= 3U; });
      }
      newest += random() % 3 == 0 ? 0U : 1U;
      const std::uint64_t number =
          newest - std::min<std::uint64_t>(newest - 1, random() % 4 == 0 ? random() % 60 : 0);
      std::vector<float> rows(hashes.size() * 2);
      for (std::size_t r = 0; r < hashes.size(); ++r) {
        rows[2 * r] = static_cast<float>(random() % 8);
        rows[2 * r + 1] = -rows[2 * r];
      }
      const bool erases = hashes.empty() || random() % 6 == 0;
      const bool assigns = random() % 4 == 0;
      const auto back = erases ? peer.erase(number, hashes)
                               : peer.write(assigns ? Op::kAssign : Op::kPush, number, hashes, rows);
      std::set<std::uint64_t> refused;
      std::set<std::uint64_t> taken;
      for (std::size_t r = 0; r < hashes.size(); ++r) {
        const std::uint64_t slot = index_of(slots.of(hashes[r]));
        if (slot < first || slot >= end) {
          refused.insert(slot);
          continue;
        }
        if (seen[slot].contains(number)) {
          continue;
        }
        taken.insert(slot);
        if (erases) {
          weights.erase(hashes[r]);
        } else if (assigns) {
          weights[hashes[r]] = rows[2 * r];
        } else {
          weights[hashes[r]] -= rows[2 * r];
        }
      }
      for (const std::uint64_t slot : taken) {
        seen[slot].insert(number);
      }
      CHECK(std::set<std::uint64_t>(back.slots.begin(), back.slots.end()) == refused);
      CHECK(back.header.status == (refused.empty() ? Status::kOk : Status::kWrongEpoch));
      CHECK_EQ(back.header.epoch, epoch);
    }
    service.set_map(++epoch, {{0, count}});
    std::vector<std::uint64_t> keys;
    for (const auto& [hash, weight] : weights) {
      keys.push_back(hash);
    }
    const auto back = anonymous.pull(keys);
    CHECK_EQ(back.values.size(), 2 * keys.size());
    for (std::size_t r = 0; r < keys.size(); ++r) {
      CHECK_EQ(back.values[2 * r], weights[keys[r]]);
      CHECK_EQ(back.values[2 * r + 1], -weights[keys[r]]);
    }
    const auto copy = service.snapshot(0);
    CHECK_EQ(copy->size(), weights.size());
    CHECK_EQ(copy->verify(), "");
  }
}

TEST(random_bytes_in_sound_headers_are_answered_and_change_no_invariant) {
  std::mt19937_64 random(5);
  Service service(Slots(16), {{0, 4}, {4, 9}, {9, 16}}, {.deferred_reads = 20, .pending_bytes = 1 << 16});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kBsp, 0, true);
  admit(service, 0, 1, 0);
  admit(service, 1, 1, 0);
  BufferPool pool;
  std::map<Status, int> met;
  for (int i = 0; i < 20'000; ++i) {
    const std::size_t keys = random() % 4;
    std::vector<std::uint64_t> hashes(keys);
    for (std::size_t k = 0; k < keys; ++k) {
      hashes[k] = (random() % 16 << 60U) + random() % 3;
    }
    std::ranges::sort(hashes);
    std::vector<float> rows(keys, 1.0F);
    const std::vector<std::uint32_t> tables(random() % 2, 0);
    const std::vector<double> doubles(random() % 2, 0.5);
    Header header{.op = static_cast<Op>(random() % 16),
                  .dtype = static_cast<wire::Dtype>(random() % 8),
                  .dim = static_cast<std::uint16_t>(random() % 4 == 0 ? random() : 1),
                  .table = static_cast<std::uint32_t>(random() % 8 == 0),
                  .worker = random() % 16 == 0 ? wire::kAnonymous : static_cast<std::uint32_t>(random() % 3),
                  .incarnation = static_cast<std::uint32_t>(random() % 16 != 0),
                  .sequence = random() % 100,
                  .clock = service.metrics().applied + static_cast<std::uint32_t>(random() % 3) -
                           static_cast<std::uint32_t>(random() % 8 == 0),
                  .count = static_cast<std::uint32_t>(keys),
                  .aux = static_cast<std::uint32_t>(random() % 8 == 0 ? random() : random() % 17),
                  .job = kJob + static_cast<std::uint32_t>(random() % 32 == 0)};
    std::vector<wire::Frame> payload;
    const auto add = [&](const auto& values) { payload.push_back(std::as_bytes(std::span(values))); };
    switch (header.op) {
      case Op::kPull:
      case Op::kErase:
      case Op::kContains:
      case Op::kState:
      case Op::kPrefetch:
        header.dtype = header.op == Op::kPull ? wire::Dtype::kFloat32 : wire::Dtype::kNone;
        add(hashes);
        break;
      case Op::kPush:
      case Op::kAssign:
        header.dtype = wire::Dtype::kFloat32;
        add(hashes);
        add(rows);
        break;
      case Op::kTick:
        header.dtype = wire::Dtype::kNone;
        header.count = static_cast<std::uint32_t>(random() % 2 == 0 ? 0 : keys);
        header.aux = static_cast<std::uint32_t>(tables.size());
        payload.push_back(std::as_bytes(std::span(hashes)).first(header.count * 8));
        add(tables);
        break;
      case Op::kReduce:
        header.dtype = wire::Dtype::kFloat64;
        header.count = static_cast<std::uint32_t>(doubles.size());
        add(doubles);
        break;
      case Op::kLoadRows:
        header.dtype = wire::Dtype::kUint8;
        add(rows);
        break;
      case Op::kLoadBegin:
      case Op::kLoadEnd:
        header.dtype = wire::Dtype::kNone;
        add(hashes);
        break;
      default:
        header.dtype = random() % 8 == 0 ? header.dtype : wire::Dtype::kNone;
    }
    std::array<std::byte, sizeof(Header)> head;
    wire::encode(header, payload, head);
    if (random() % 16 == 0) {
      head.at(random() % head.size()) ^= std::byte{1};
    }
    std::vector<wire::Frame> frames{head};
    frames.insert(frames.end(), payload.begin(), payload.end());
    if (random() % 32 == 0) {
      frames.resize(random() % frames.size());
    }
    ReplyQueue out(pool);
    service.handle("peer", frames, out);
    if (random() % 50 == 0) {
      switch (random() % 5) {
        case 0:
          hold(service);
          break;
        case 1:
          resume(service);
          break;
        case 2:
          service.set_map(static_cast<std::uint32_t>(random() % 3), {{random() % 8, 8 + random() % 9}});
          break;
        case 3:
          dismiss(service, 2, 1);
          break;
        default:
          service.set_map(0, {{0, 16}});
      }
      service.released(out);
    }
    const auto back = Peer1::read(out);  // every reply is a sound message
    for (const auto& reply : back) {
      ++met[reply.header.status];
    }
    const auto metrics = service.metrics();
    CHECK(metrics.applied <= metrics.floor);
    CHECK(metrics.deferred_reads <= 20);
    CHECK(metrics.pending_bytes <= (3U << 15U) + 10'000);
  }
  for (const Status status :
       {Status::kOk, Status::kDeferred, Status::kBadRequest, Status::kWrongEpoch, Status::kFenced,
        Status::kNotAdmitted, Status::kNoTable, Status::kRetry, Status::kOverloaded, Status::kWrongJob}) {
    CHECK(met[status] > 0);
  }
  CHECK_EQ(met[Status::kInternal], 0);
  CHECK_EQ(service.snapshot(0)->verify(), "");
}

// --- no memory ---------------------------------------------------------------------------------------------

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(SHOAL_SANITIZED)

namespace {

// While it lives, the process gets `more` bytes of addresses at most.
class Scarcity {
 public:
  explicit Scarcity(std::size_t more) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    const rlimit now{pages * 4096 + more, before_.rlim_max};
    setrlimit(RLIMIT_AS, &now);
  }
  ~Scarcity() { setrlimit(RLIMIT_AS, &before_); }
  Scarcity(const Scarcity&) = delete;
  Scarcity& operator=(const Scarcity&) = delete;

 private:
  rlimit before_{};
};

// Keys, and one gradient of ones for each.
struct Work {
  std::vector<std::uint64_t> hashes;
  std::vector<float> rows;
};

Work many_keys(std::size_t dim) {
  std::mt19937_64 random(11);
  Work work{random_hashes(random, 60'000, ~std::uint64_t{0}), {}};
  work.rows.assign(work.hashes.size() * dim, 1.0F);
  return work;
}

}  // namespace

TEST(a_push_that_memory_stops_is_told_and_goes_on_where_it_was_stopped) {
  if (check::is_emulated()) {
    return;
  }
  constexpr std::size_t kDim = 24;
  const Work work = many_keys(kDim);
  int stopped = 0;
  int halfway = 0;
  for (std::size_t more = 0; more < 24U << 20U; more += std::size_t{3} << 19U) {
    Service service(Slots(4), {{0, 4}});
    add_table(service, 0, sgd(kDim));
    start_job(service, kJob, Mode::kAsp, 0, false);
    admit(service, 0, 1, 0);
    Peer1 peer{service};
    std::vector<Peer1::Back> back;
    {
      const Scarcity scarcity(more);
      const std::array<wire::Frame, 2> payload{std::as_bytes(std::span(work.hashes)),
                                               std::as_bytes(std::span(work.rows))};
      back = peer.send({.op = Op::kPush,
                        .dtype = wire::Dtype::kFloat32,
                        .dim = kDim,
                        .sequence = 1,
                        .count = static_cast<std::uint32_t>(work.hashes.size())},
                       payload);
    }
    const bool done = !back.empty() && back[0].header.status == Status::kOk;
    if (!done) {
      ++stopped;
      CHECK(back.empty() || back[0].header.status == Status::kInternal);
      const auto some = peer.pull(work.hashes);
      const auto stepped = std::ranges::count(some.values, -1.0F);
      CHECK_EQ(stepped + std::ranges::count(some.values, 0.0F), std::ssize(some.values));
      halfway += stepped != 0 && stepped != std::ssize(some.values) ? 1 : 0;
    }
    for (int again = 0; again < 2; ++again) {
      CHECK(peer.write(Op::kPush, 1, work.hashes, work.rows).header.status == Status::kOk);
    }
    const auto all = peer.pull(work.hashes);
    CHECK_EQ(std::ranges::count(all.values, -1.0F), std::ssize(work.rows));
    CHECK_EQ(service.snapshot(0)->verify(), "");
  }
  CHECK(stopped > 3);
  CHECK(halfway > 0);
}

TEST(a_turn_that_memory_stops_is_one_step_in_the_end) {
  if (check::is_emulated()) {
    return;
  }
  constexpr std::size_t kDim = 24;
  const Work work = many_keys(kDim);
  int stopped = 0;
  int halfway = 0;
  for (std::size_t more = 0; more < 48U << 20U; more += std::size_t{3} << 19U) {
    Service service(Slots(4), {{0, 4}});
    add_table(service, 0, sgd(kDim));
    start_job(service, kJob, Mode::kBsp, 0, false);
    admit(service, 0, 1, 0);
    admit(service, 1, 1, 0);
    Peer1 one{service};
    Peer1 two{service, 1};
    one.write(Op::kPush, 1, work.hashes, work.rows);
    two.write(Op::kPush, 1, work.hashes, work.rows);
    CHECK_EQ(one.tick(0).size(), 1);
    {
      const Scarcity scarcity(more);
      const auto back = two.tick(0);
      CHECK(back.empty() || back[0].header.status == Status::kOk);
    }
    if (service.metrics().failed_steps != 0) {
      ++stopped;
      CHECK_EQ(service.metrics().applied, 0);
      Peer1 anonymous{service, wire::kAnonymous, 0};
      // Any message tries again; this one reads first.
      const auto some = anonymous.pull(work.hashes);
      halfway += std::ranges::count(some.values, -2.0F) != 0 ? 1 : 0;
    }
    const auto all = one.pull(work.hashes, 1);
    CHECK(all.header.status == Status::kOk);
    CHECK_EQ(std::ranges::count(all.values, -2.0F), std::ssize(work.rows));
    CHECK_EQ(service.snapshot(0)->step(), 1);
    CHECK_EQ(service.metrics().pending_bytes, 0);
  }
  CHECK(stopped > 3);
  CHECK(halfway > 0);
}

// One arc has applied a clock, and another has no memory for it. A read of the next clock waits for both, and
// what has been pushed in that clock and ticked meanwhile is not in its answer.
TEST(a_read_sees_the_same_clocks_in_arcs_of_which_one_was_stopped_by_memory) {
  if (check::is_emulated()) {
    return;
  }
  constexpr std::size_t kDim = 24;
  const Work work = many_keys(kDim);
  const std::vector<std::uint64_t> few = {work.hashes.front(), work.hashes.back()};
  const std::vector<float> ones(2 * kDim, 1.0F);
  int apart = 0;
  for (std::size_t more = 0; more < 48U << 20U; more += std::size_t{1} << 20U) {
    Service service(Slots(4), {{0, 1}, {1, 4}});
    add_table(service, 0, sgd(kDim));
    start_job(service, kJob, Mode::kBsp, 0, false);
    admit(service, 0, 1, 0);
    admit(service, 1, 1, 0);
    Peer1 one{service};
    Peer1 two{service, 1};
    Peer1 anonymous{service, wire::kAnonymous, 0};
    one.write(Op::kPush, 1, work.hashes, work.rows);
    two.write(Op::kPush, 1, work.hashes, work.rows);
    one.tick(0);
    std::vector<float> seen;
    std::array<Status, 4> met{};
    const auto note = [&](std::size_t i, const std::vector<Peer1::Back>& back) {
      met.at(i) = back.empty() ? Status::kInternal : back.front().header.status;
      for (const Peer1::Back& reply : back) {
        if (reply.header.op == Op::kPull && reply.header.status == Status::kOk) {
          seen = reply.values;
        }
      }
    };
    const std::array<wire::Frame, 1> keys{std::as_bytes(std::span(few))};
    const std::array<wire::Frame, 2> rows{std::as_bytes(std::span(few)), std::as_bytes(std::span(ones))};
    std::vector<float> before;
    {
      const Scarcity scarcity(more);
      two.tick(0);
      const auto read = anonymous.send(
          {.op = Op::kPull, .dtype = wire::Dtype::kFloat32, .sequence = std::uint64_t{1} << 63U, .count = 2},
          keys);
      before = read.empty() ? std::vector<float>() : read.front().values;
      note(0, one.send({.op = Op::kPull,
                        .dtype = wire::Dtype::kFloat32,
                        .sequence = (std::uint64_t{1} << 63U) + 1,
                        .clock = 1,
                        .count = 2},
                       keys));
      note(1, one.send({.op = Op::kPush,
                        .dtype = wire::Dtype::kFloat32,
                        .dim = kDim,
                        .sequence = 2,
                        .clock = 1,
                        .count = 2},
                       rows));
      note(2, one.tick(1));
      note(3, two.tick(1));
    }
    if (met != std::array{Status::kDeferred, Status::kOk, Status::kOk, Status::kOk} || !seen.empty()) {
      continue;
    }
    apart += before.size() == 2 * kDim && before.front() != before.back() ? 1 : 0;
    note(0, two.tick(1));  // any message: there is memory again
    CHECK_EQ(std::ranges::count(seen, -2.0F), std::ssize(ones));
    const auto all = one.pull(few, 2);
    CHECK(all.header.status == Status::kOk);
    CHECK_EQ(std::ranges::count(all.values, -3.0F), std::ssize(ones));
    CHECK_EQ(service.metrics().applied, 2);
    CHECK_EQ(service.snapshot(0)->step(), 2);
  }
  CHECK(apart > 0);
}

#endif

// --- at the same time --------------------------------------------------------------------------------------

TEST(requests_and_control_calls_from_two_threads_do_not_disturb_each_other) {
  Endpoint service(Slots(64), {{0, 16}, {16, 64}});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kSsp, 1, false);
  admit(service, 0, 1, 0);
  std::atomic<int> woken{0};
  std::atomic<bool> ended{false};
  service.set_waker([&] { woken.fetch_add(1); });
  constexpr std::uint32_t kClocks = 300;
  std::vector<float> last;
  ThreadPool pool(2);
  pool.run(2, [&](std::size_t part) {
    if (part == 0) {
      std::mt19937_64 random(9);
      Peer1 peer{service};
      BufferPool buffers;
      const auto hashes = random_hashes(random, 500, 1000);
      const std::vector<float> ones(hashes.size(), 1.0F);
      for (std::uint32_t clock = 0; clock < kClocks; ++clock) {
        CHECK(peer.write(Op::kPush, clock + 1, hashes, ones, clock).header.status == Status::kOk);
        peer.tick(clock);
        const auto back = peer.pull(hashes, clock);
        CHECK(back.header.status == Status::kOk || back.header.status == Status::kDeferred);
        ReplyQueue out(buffers);
        service.released(out);
      }
      Peer1 anonymous{service, wire::kAnonymous, 0};
      last = anonymous.pull(hashes).values;
      ended.store(true);
    } else {
      std::uint32_t round = 0;
      while (!ended.load()) {
        ++round;
        hold(service);
        admit(service, 1, 2 * round, hold(service));
        const std::uint32_t ended_here = fence(service, 1, 2 * round).clock;
        CHECK(dismiss(service, 1, 2 * round, {.clock = ended_here + 1, .tables = {0}}) > ended_here);
        resume(service);
        service.set_map(0, {{0, 64}});
        add_table(service, round, sgd(2));
        drop_table(service, round);
        CHECK_EQ(service.snapshot(0)->verify(), "");
        CHECK(service.metrics().deferred_reads <= kClocks);
        service.set_waker([&] { woken.fetch_add(1); });
      }
      service.set_waker({});
    }
  });
  CHECK_EQ(std::ranges::count(last, -static_cast<float>(kClocks)), std::ssize(last));
}

// A thread fills the rows of one load after another during pushes; some loads are cancelled, and the workers
// of some are dismissed.
TEST(what_a_thread_restores_of_a_load_takes_the_place_of_rows_that_went_on_or_is_given_up) {
  constexpr std::size_t kSlots = 16;
  Endpoint service(Slots(kSlots), {{0, 6}, {6, kSlots}});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kAsp, 0, false);
  std::mt19937_64 random(14);
  const auto hashes = random_hashes(random, 2000, 4000);
  const std::vector<float> ones(hashes.size(), 1.0F);
  ThreadPool pool(2);
  std::vector<std::byte> section;
  {
    ThreadPool own(1);
    Shard whole(sgd(1), Slots(2), own);
    std::vector<std::uint64_t> offsets(3, hashes.size());
    offsets[0] = 0;
    offsets[1] = static_cast<std::uint64_t>(std::ranges::lower_bound(hashes, Slots(2).first_hash(Slot{1})) -
                                            hashes.begin());
    whole.assign({hashes, offsets}, ones);
    CHECK_EQ(whole.section(Slot{0}, section), offsets[1]);
  }
  const std::size_t rows = static_cast<std::size_t>(
      std::ranges::lower_bound(hashes, Slots(2).first_hash(Slot{1})) - hashes.begin());
  constexpr int kLoads = 12;
  int whole = 0;
  int given_up = 0;
  pool.run(2, [&](std::size_t part) {
    if (part == 0) {
      std::uint32_t incarnation = 0;
      for (int load = 0; load < kLoads; ++load) {
        admit(service, 0, ++incarnation, 0);
        Peer1 peer{.service = service, .incarnation = incarnation};
        std::uint64_t sequence = 1;
        const auto numbers = [&](Op op, const std::vector<std::uint64_t>& given) {
          return peer.numbers(op, sequence++, given).header.status;
        };
        CHECK(numbers(Op::kLoadBegin, std::vector<std::uint64_t>(kSlots, 0)) == Status::kOk);
        const std::uint64_t number = sequence;
        CHECK(numbers(Op::kSaveBegin, {1, 2, 3, 4, std::uint64_t{3} << 32U}) == Status::kOk);
        for (int i = 0; i < 5; ++i) {
          CHECK(peer.write(Op::kPush, sequence++, hashes, ones).header.status == Status::kOk);
        }
        if (load % 3 == 1) {
          dismiss(service, 0, incarnation);
          continue;
        }
        const std::vector<std::uint64_t> named = {number};
        const std::array<wire::Frame, 2> words{std::as_bytes(std::span(named)), wire::Frame()};
        const Header tell{.op = Op::kSavePoll,
                          .dtype = wire::Dtype::kUint8,
                          .sequence = std::uint64_t{1} << 63U,
                          .count = 1};
        if (load % 3 == 2) {
          CHECK(numbers(Op::kSaveEnd, {number}) == Status::kOk);
          CHECK(numbers(Op::kLoadEnd, {7}) == Status::kBadRequest);  // nothing of it remains
          continue;
        }
        while (peer.one(tell, words).header.payload_bytes == 0) {
        }
        CHECK(numbers(Op::kSaveEnd, {number, 1, 2, 3, 4}) == Status::kOk);
        CHECK(numbers(Op::kLoadEnd, {7}) == Status::kOk);
        const auto pulled = peer.pull(hashes).values;
        CHECK_EQ(std::ranges::count(pulled, 1.0F), static_cast<std::ptrdiff_t>(rows));
        CHECK_EQ(std::ranges::count(pulled, 0.0F), std::ssize(pulled) - static_cast<std::ptrdiff_t>(rows));
      }
      service.close_sessions();
      return;
    }
    while (const auto load = service.next_session()) {
      try {
        CHECK(load->loads());
        CHECK_EQ(load->restore(0, rows, section), rows);
        load->set_status("done");
        ++whole;
      } catch (const std::invalid_argument&) {
        CHECK(load->ended());
        ++given_up;
      }
    }
  });
  CHECK(whole >= kLoads / 3);
  CHECK(whole + given_up <= kLoads);
}

// There is memory for one load: the next finds it free although the last has just been given up.
TEST(a_load_that_is_given_up_leaves_the_memory_budget_at_once) {
  constexpr std::size_t kSlots = 16;
  Service service(Slots(kSlots), {{0, 6}, {6, kSlots}});
  set_memory(service, 160'000);  // for each slot: a thousand rows of 64 bytes take some 96,000
  add_table(service, 0, sgd(16));
  start_job(service, kJob, Mode::kAsp, 0, false);
  admit(service, 0, 1, 0);
  Peer1 peer{service};
  std::uint64_t sequence = 1;
  const auto numbers = [&](Op op, const std::vector<std::uint64_t>& given) {
    return peer.numbers(op, sequence++, given).header.status;
  };
  for (int load = 0; load < 50; ++load) {
    CHECK(numbers(Op::kLoadBegin, std::vector<std::uint64_t>(kSlots, 1000)) == Status::kOk);
    const std::uint64_t number = sequence;
    CHECK(numbers(Op::kSaveBegin, {1, 2, 3, 4, std::uint64_t{3} << 32U}) == Status::kOk);
    CHECK(numbers(Op::kLoadBegin, std::vector<std::uint64_t>(kSlots, 1000)) == Status::kResourceExhausted);
    CHECK(numbers(Op::kSaveEnd, {number}) == Status::kOk);
  }
}

// A thread takes one save after another during pushes, the loading of the table, and the dismissal of
// workers.
TEST(what_is_taken_of_a_save_is_the_rows_of_its_moment_whatever_comes_behind_it) {
  constexpr std::size_t kSlots = 16;
  Endpoint service(Slots(kSlots), {{0, 6}, {6, kSlots}});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kAsp, 0, false);
  admit(service, 0, 1, 0);
  std::mt19937_64 random(13);
  const auto hashes = random_hashes(random, 2000, 4000);
  const std::vector<float> ones(hashes.size(), 1.0F);
  constexpr int kSaves = 12;
  int whole = 0;
  int given_up = 0;
  ThreadPool pool(2);
  pool.run(2, [&](std::size_t part) {
    if (part == 0) {
      Peer1 peer{service};
      std::uint64_t sequence = 1;
      for (int save = 0; save < kSaves; ++save) {
        for (int i = 0; i < 3; ++i) {
          CHECK(peer.write(Op::kPush, sequence++, hashes, ones).header.status == Status::kOk);
        }
        const std::vector<std::uint64_t> wanted = {0, 0, 0, 0, std::uint64_t{save % 2 == 0 ? 0U : 1U} << 32U};
        const std::array<wire::Frame, 1> begin{std::as_bytes(std::span(wanted))};
        const std::uint64_t number = sequence++;
        const Header header{
            .op = Op::kSaveBegin, .sequence = number, .count = static_cast<std::uint32_t>(wanted.size())};
        while (peer.one(header, begin).header.status == Status::kOverloaded) {
        }
        for (int i = 0; i < 5; ++i) {
          CHECK(peer.write(Op::kPush, sequence++, hashes, ones).header.status == Status::kOk);
        }
        // Until the other thread has said that all is taken; or it is given up, or its table goes.
        const std::vector<std::uint64_t> named = {number};
        const std::array<wire::Frame, 2> words{std::as_bytes(std::span(named)), wire::Frame()};
        const Header tell{.op = Op::kSavePoll,
                          .dtype = wire::Dtype::kUint8,
                          .sequence = std::uint64_t{1} << 63U,
                          .count = 1};
        if (save % 4 == 3) {
          drop_table(service, 0);
          add_table(service, 0, sgd(1));
        }
        while (save % 4 != 2 && peer.one(tell, words).header.payload_bytes == 0) {
        }
        const std::vector<std::uint64_t> ended = {number, 1, 2, 3, 4};
        const std::span<const std::uint64_t> end = save % 4 == 2 ? std::span(named) : std::span(ended);
        const std::array<wire::Frame, 1> last{std::as_bytes(end)};
        CHECK(peer.one({.op = Op::kSaveEnd,
                        .sequence = sequence++,
                        .count = static_cast<std::uint32_t>(end.size())},
                       last)
                  .header.status == Status::kOk);
      }
      service.close_sessions();
      return;
    }
    while (const auto save = service.next_session()) {
      const std::uint64_t steps = save->summaries()[0];
      try {
        std::size_t rows = 0;
        Shard copy(sgd(1), Slots(kSlots), pool);
        for (std::size_t slot = 0; slot < kSlots; ++slot) {
          const Snapshot::Piece piece = save->take(0, Slot{static_cast<std::uint32_t>(slot)});
          copy.restore(piece.rows, piece.section);
          rows += piece.rows;
        }
        CHECK_EQ(rows, save->summaries()[2]);
        std::vector<std::uint64_t> offsets(kSlots + 1);
        for (std::size_t slot = 0; slot <= kSlots; ++slot) {
          offsets[slot] = static_cast<std::uint64_t>(
              slot == kSlots ? std::ssize(hashes)
                             : std::ranges::lower_bound(
                                   hashes, Slots(kSlots).first_hash(Slot{static_cast<std::uint32_t>(slot)})) -
                                   hashes.begin());
        }
        std::vector<float> weights(hashes.size());
        copy.pull({hashes, offsets}, weights);
        CHECK_EQ(std::ranges::count(weights, -static_cast<float>(steps)), std::ssize(weights));
        ++whole;
        save->set_status("taken");
      } catch (const std::invalid_argument&) {
        CHECK(save->ended());
        ++given_up;
      }
    }
  });
  CHECK(whole >= kSaves / 2);
  CHECK(whole + given_up <= kSaves);
}

namespace {

// A clock that is 1000 ns further each time it is read.
std::uint64_t fake_now = 0;
std::uint64_t fake_clock() noexcept { return fake_now += 1000; }

}  // namespace

TEST(the_rows_are_timed_for_requests_that_ask_for_it_and_for_no_others) {
  BufferPool pool;
  const std::vector<std::uint64_t> hashes{3, std::uint64_t{9} << 60U};  // one in each arc
  const std::vector<float> ones{1, 1};
  const std::array<std::uint32_t, 1> tables{0};
  const auto reply_of = [&](Service& service, std::uint32_t rank, Header header, std::uint64_t received_ns) {
    header.worker = rank;
    header.incarnation = 1;
    header.job = kJob;
    std::vector<wire::Frame> payload;
    if (header.op == Op::kTick) {
      payload = {{}, std::as_bytes(std::span(tables))};
      header.aux = 1;
    } else {
      header.count = header.clock == 0 ? 2 : 1;
      payload = {std::as_bytes(std::span(hashes).first(header.count))};
      header.dtype = wire::Dtype::kFloat32;
      if (header.op != Op::kPull) {
        payload.push_back(std::as_bytes(std::span(ones)));
        header.dim = 1;
      }
    }
    std::array<std::byte, sizeof(Header)> head;
    wire::encode(header, payload, head);
    std::vector<wire::Frame> frames{head};
    frames.insert(frames.end(), payload.begin(), payload.end());
    ReplyQueue out(pool);
    service.handle("peer", frames, out, nullptr, received_ns);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> times;
    for (const Reply& reply : out.replies()) {
      times.emplace_back(reply.received_ns, reply.shard_ns);
    }
    return times;
  };
  using Times = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  const std::uint64_t read = std::uint64_t{1} << 63U;
  const auto make = [&](Service& service, Mode mode) {
    add_table(service, 0, sgd(1));
    start_job(service, kJob, mode, 0, false);
    admit(service, 0, 1, 0);
    admit(service, 1, 1, 0);
    service.set_clock(&fake_clock);
  };
  const std::vector<SlotRange> arcs{{0, 8}, {8, 16}};
  Service asp(Slots(16), arcs);
  make(asp, Mode::kAsp);
  // A write takes two readings, 1000 ns, and a read that for each arc.
  CHECK(reply_of(asp, 0, {.op = Op::kPush, .flags = wire::kTimed, .sequence = 1}, 7) == (Times{{7, 1000}}));
  CHECK(reply_of(asp, 0, {.op = Op::kPush, .flags = wire::kTimed, .sequence = 1}, 8) ==
        (Times{{8, 0}}));  // again
  CHECK(reply_of(asp, 0, {.op = Op::kAssign, .flags = wire::kTimed, .sequence = 2}, 9) == (Times{{9, 1000}}));
  CHECK(reply_of(asp, 0, {.op = Op::kPull, .flags = wire::kTimed, .sequence = read}, 10) ==
        (Times{{10, 2000}}));
  const std::uint64_t before = fake_now;
  CHECK(reply_of(asp, 0, {.op = Op::kPull, .sequence = read}, 11) == (Times{{0, 0}}));
  CHECK(reply_of(asp, 0, {.op = Op::kPull, .flags = wire::kTimed, .sequence = read}, 0) == (Times{{0, 0}}));
  CHECK(reply_of(asp, 0, {.op = Op::kPull, .flags = wire::kTimed, .table = 5, .sequence = read}, 12) ==
        (Times{{0, 0}}));  // refused
  CHECK_EQ(fake_now, before);

  // Under BSP a push is kept, the last tick of a clock takes the steps, and a pull that it releases has its
  // own time.
  Service bsp(Slots(16), arcs);
  make(bsp, Mode::kBsp);
  CHECK(reply_of(bsp, 0, {.op = Op::kPush, .flags = wire::kTimed, .sequence = 1}, 7) == (Times{{7, 0}}));
  CHECK(reply_of(bsp, 0, {.op = Op::kTick, .flags = wire::kTimed, .sequence = read}, 8) == (Times{{8, 0}}));
  CHECK(reply_of(bsp, 0, {.op = Op::kPull, .flags = wire::kTimed, .sequence = read + 1, .clock = 1}, 9) ==
        (Times{{0, 0}}));  // deferred
  CHECK(reply_of(bsp, 1, {.op = Op::kTick, .flags = wire::kTimed, .sequence = read}, 10) ==
        (Times{{10, 2000}, {9, 1000}}));
}

// --- several jobs ------------------------------------------------------------------------------------------

namespace {

constexpr std::uint32_t kOther = 91;  // a named job

void start_two_jobs(Service& service) {
  start_job(service, kJob, Mode::kBsp, 0, false);
  admit(service, 0, 1, 0);
  admit(service, 1, 1, 0);
  start_job(service, kOther, Mode::kAsp, 0, false, 0, true);
  admit(service, 0, 1, 0, kOther);
}

// Replaces the arcs by copies of them.
void copy_arcs(Service& service, const std::vector<SlotRange>& arcs) {
  std::vector<std::unique_ptr<Arc>> copies;
  for (const SlotRange& arc : arcs) {
    ArcRestorer restorer;
    for (const auto& piece : service.save_arc(arc)) {
      restorer.add(piece);
    }
    copies.push_back(restorer.finish());
  }
  service.discard(take_arcs(service, arcs));
  service.adopt(copies);
  service.set_map(1, arcs);
}

}  // namespace

TEST(a_worker_that_an_order_dismisses_at_a_clock_out_of_reach_keeps_nobody_busy) {
  for (const Mode mode : {Mode::kBsp, Mode::kSsp, Mode::kAsp}) {
    Service service(Slots(64), {{0, 64}});
    start_job(service, 1, mode, 2, false);
    admit(service, 0, 1, 3);
    const std::uint32_t ended =
        dismiss(service, 0, 1, {.clock = std::numeric_limits<std::uint32_t>::max(), .tables = {}});
    CHECK(ended > 3 && ended < 1U << 20U);
    CHECK_EQ(dismiss(service, 0, 1), ended);
  }
}

TEST(jobs_have_clocks_of_their_own_and_share_rows) {
  const std::vector<SlotRange> arcs{{0, 4}, {4, 8}};
  Service service(Slots(8), arcs);
  add_table(service, 0, sgd(1));
  start_two_jobs(service);
  Peer1 zero{service};
  Peer1 one{service, 1};
  Peer1 other{service, 0, 1, 0, kOther};
  std::mt19937_64 random(11);
  const auto hashes = random_hashes(random, 64, 1000);
  const std::vector<float> ones(hashes.size(), 1.0F);
  const auto rows_of = [&](Peer1& peer, std::uint32_t clock) {
    const auto back = peer.pull(hashes, clock);
    CHECK(back.header.status == Status::kOk);
    CHECK(std::ranges::all_of(back.values, [&](float value) { return value == back.values.front(); }));
    return back.values.front();
  };
  // The same rank and sequence number in two jobs are two writes.
  zero.write(Op::kPush, 1, hashes, ones);
  other.write(Op::kPush, 1, hashes, ones);
  other.write(Op::kPush, 1, hashes, ones);
  CHECK_EQ(rows_of(zero, 0), -1.0F);
  CHECK_EQ(rows_of(other, 0), -1.0F);
  // The ticks of one job end no clock of the other.
  for (std::uint32_t clock = 0; clock < 5; ++clock) {
    CHECK_EQ(other.tick(clock).size(), 1);
  }
  CHECK_EQ(service.metrics().applied, 0);
  CHECK_EQ(zero.tick(0).size(), 1);
  copy_arcs(service, arcs);
  other.epoch = one.epoch = zero.epoch = 1;
  CHECK(zero.pull(hashes, 1).header.status == Status::kDeferred);
  other.write(Op::kPush, 2, hashes, ones, 5);
  one.write(Op::kPush, 1, hashes, ones);
  const auto released = one.tick(0);
  CHECK_EQ(released.size(), 1 + 1);  // the read of worker 0 has its answer
  CHECK_EQ(released.back().values.front(), -4.0F);
  CHECK_EQ(rows_of(other, 5), -4.0F);
  CHECK_EQ(service.metrics().jobs.size(), 1);
  CHECK_EQ(service.metrics().jobs.front().number, kOther);
  // A worker that is dismissed has a namesake in the other job, which stays.
  fence(service, 0, 1, kOther);
  CHECK(other.pull(hashes, 5).header.status == Status::kFenced);
  CHECK_EQ(dismiss(service, 0, 1, {}, kOther), 5);
  CHECK_EQ(rows_of(zero, 1), -4.0F);
  end_job(service, kOther);
  end_job(service, kOther);
  CHECK(other.pull(hashes, 5).header.status == Status::kWrongJob);
  CHECK_EQ(rows_of(zero, 1), -4.0F);
  // The next default job ends no named one.
  start_job(service, kOther, Mode::kAsp, 0, false, 0, true);
  admit(service, 0, 2, 0, kOther);
  start_job(service, kJob + 1, Mode::kAsp, 0, false, 1);
  CHECK(zero.pull(hashes, 1).header.status == Status::kWrongJob);
  other.incarnation = 2;
  CHECK_EQ(rows_of(other, 0), -4.0F);
  CHECK_EQ(service.snapshot(0)->verify(), "");
}

// What a job does on tables of its own has the same bits as without the other one, whatever their order.
TEST(a_peek_sees_integers_of_served_slots_after_their_clock_and_counts_nothing) {
  Service service(Slots(4), {{0, 2}, {2, 4}});
  add_table(service, 0,
            {.dim = 2 * kInt64Floats,
             .dtype = Dtype::kFloat32,
             .optimizer = Optimizer("Add", {}),
             .init = Init("Zeros", 0, 0),
             .seed = 0});
  add_table(service, 1, sgd(4));
  start_job(service, kJob, Mode::kBsp, 0, false);
  admit(service, 0, 1, 0);
  Peer1 peer{.service = service};
  const std::vector<std::uint64_t> there{7, std::uint64_t{3} << 62U};
  std::vector<float> rows(there.size() * 2 * kInt64Floats);
  for (std::size_t e = 0; e < 2 * there.size(); ++e) {
    store_int64((std::uint64_t{1} << 60U) * (e + 1) - e, &rows[e * kInt64Floats]);
  }
  peer.write(Op::kPush, 1, there, rows);
  const auto pulled = [&] {
    std::uint64_t all = 0;
    for (const Service::TableLoad& load : service.table_loads()) {
      all += load.stats.pulls + load.stats.rows_pulled;
    }
    return all;
  };
  const std::uint64_t sampled = service.hot_keys(9).second;
  const std::vector<std::uint64_t> asked{there[1], 9, there[0]};
  CHECK(service.peek(0, asked) == std::vector<std::int64_t>(6));
  peer.tick(0, {1});
  const std::int64_t unit = std::int64_t{1} << 60U;
  CHECK(service.peek(0, asked) ==
        (std::vector<std::int64_t>{3 * unit - 2, 4 * unit - 3, 0, 0, unit, 2 * unit - 1}));
  CHECK_EQ(pulled(), 0);
  CHECK(service.metrics().requests[std::size_t(Op::kPull)] == 0);
  CHECK_EQ(service.hot_keys(9).second, sampled);
  CHECK(service.peek(1, asked).empty());
  CHECK(service.peek(2, asked).empty());
  CHECK(service.peek(0, {}).empty());
  service.set_map(2, {{2, 4}});
  CHECK(service.peek(0, asked).empty());
  CHECK_EQ(service.peek(0, std::vector{there[1]}).size(), 2);
}

TEST(an_endpoint_without_slots_refuses_whatever_an_older_map_sends_it) {
  Service service(Slots(4), {});
  add_table(service, 0, sgd(1));
  service.set_map(5, {});
  for (const std::uint32_t job : {kDefaultJob, kJob}) {
    for (const std::uint32_t rank : {0U, 60'000'000U, 0xfffffff0U}) {
      Peer1 stranger{.service = service, .rank = rank, .epoch = 4, .job = job};
      for (const Op op : {Op::kPull, Op::kContains, Op::kErase, Op::kPrefetch}) {
        const auto ask = [&](const std::vector<std::uint64_t>& hashes) {
          const std::array<wire::Frame, 1> payload{std::as_bytes(std::span(hashes))};
          return stranger.one({.op = op,
                               .dtype = op == Op::kPull ? wire::Dtype::kFloat32 : wire::Dtype::kNone,
                               .sequence = 1,
                               .count = static_cast<std::uint32_t>(hashes.size())},
                              payload);
        };
        CHECK(ask({}).header.status == Status::kWrongEpoch);
        const auto back = ask({0, ~std::uint64_t{0}});
        CHECK(back.header.status == Status::kWrongEpoch);
        CHECK_EQ(back.slots, std::vector<std::uint16_t>({0, 3}));
      }
      CHECK(stranger.write(Op::kPush, 3, {}, {}).header.status == Status::kWrongEpoch);
      CHECK(stranger.write(Op::kAssign, 3, {7}, {1.0F}).header.status == Status::kWrongEpoch);
    }
  }
}

// In a thread of its own.
TEST(a_reader_who_asks_for_the_best_of_many_rows_is_answered_once_and_nobody_waits_for_it) {
  constexpr std::size_t kRows = 200'000;
  Endpoint service(Slots(16), {{0, 8}, {8, 16}});
  service.set_map(1, {{0, 8}, {8, 16}});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kAsp, 0, false);
  admit(service, 0, 1, 0);
  std::mutex mutex;
  std::condition_variable queued;
  std::size_t woken = 0;
  service.set_waker([&] {
    const std::lock_guard lock(mutex);
    ++woken;
    queued.notify_one();
  });
  std::vector<std::uint64_t> hashes(kRows);
  std::vector<float> grads(kRows);
  for (std::size_t i = 0; i < kRows; ++i) {
    hashes[i] = i * (~std::uint64_t{0} / kRows);
    grads[i] = -static_cast<float>(i % 1000);
  }
  Peer1 worker{.service = service, .epoch = 1};
  CHECK(worker.write(Op::kPush, 1, hashes, grads).header.status == Status::kOk);
  Peer1 reader{.service = service, .rank = wire::kAnonymous, .incarnation = 7, .epoch = 1};
  const std::array<double, 1> most{3.0};
  const std::array<wire::Frame, 1> payload{std::as_bytes(std::span(most))};
  const auto ask = [&](std::uint64_t sequence) {
    return reader.one({.op = Op::kReduce,
                       .dtype = wire::Dtype::kFloat64,
                       .sequence = sequence,
                       .count = 1,
                       .aux = static_cast<std::uint32_t>(Function::kTopK)},
                      payload);
  };
  const auto answers = [&](std::size_t count) {
    {
      std::unique_lock lock(mutex);
      queued.wait(lock, [&] { return woken >= count; });
    }
    ReplyQueue out(reader.pool);
    service.released(out);
    std::vector<Header> headers;
    for (const Reply& reply : out.replies()) {
      std::memcpy(&headers.emplace_back(), reply.header.data(), sizeof(Header));
    }
    return headers;
  };
  CHECK(ask(1).header.status == Status::kDeferred);
  CHECK(worker.write(Op::kPush, 2, {5}, {1.0F}).header.status == Status::kOk);
  const auto first = answers(1);
  CHECK_EQ(first.size(), 1);
  CHECK(first[0].status == Status::kOk);
  CHECK_EQ(first[0].count, 6);  // three rows, with their hashes
  CHECK(ask(2).header.status == Status::kDeferred);
  service.set_map(2, {{0, 8}});  // meanwhile a half of the slots has left
  const auto late = answers(2);
  CHECK_EQ(late.size(), 1);
  const bool is_late = late[0].status == Status::kWrongEpoch;
  CHECK(is_late || late[0].status == Status::kOk);  // it had ended before
  reader.epoch = 2;
  for (std::uint64_t n = 0; n < Scans::kMost + 2; ++n) {
    const Status status = ask(10 + n).header.status;
    CHECK(status == Status::kDeferred || (n >= Scans::kMost && status == Status::kOverloaded));
  }
  service.set_waker({});
}

TEST(jobs_on_tables_of_their_own_do_not_change_each_other) {
  const std::vector<SlotRange> arcs{{0, 4}, {4, 8}};
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    Service both(Slots(8), arcs);
    Service first(Slots(8), arcs);
    Service second(Slots(8), arcs);
    for (Service* const service : {&both, &first, &second}) {
      add_table(*service, 0, sgd(2));
      add_table(*service, 1, sgd(2));
      start_two_jobs(*service);
    }
    struct Side {
      Peer1 here;
      Peer1 there;  // alone
      std::uint32_t table;
      std::uint32_t clock = 0;
      std::uint64_t sequence = 0;
    };
    std::array<Side, 3> sides{Side{{both, 0}, {first, 0}, 0}, Side{{both, 1}, {first, 1}, 0},
                              Side{{both, 0, 1, 0, kOther}, {second, 0, 1, 0, kOther}, 1}};
    for (int i = 0; i < 200; ++i) {
      Side& side = sides[random() % sides.size()];
      const std::uint64_t what = random() % 8;
      if (what < 5) {
        const auto hashes = random_hashes(random, 1 + random() % 20, 50);
        std::vector<float> rows(2 * hashes.size());
        std::ranges::generate(rows, [&] { return static_cast<float>(random() % 1000) / 7.0F; });
        const std::array<wire::Frame, 2> payload{std::as_bytes(std::span(std::as_const(hashes))),
                                                 std::as_bytes(std::span(std::as_const(rows)))};
        const Header header{.op = Op::kPush,
                            .dtype = wire::Dtype::kFloat32,
                            .dim = 2,
                            .table = side.table,
                            .sequence = ++side.sequence,
                            .clock = side.clock,
                            .count = static_cast<std::uint32_t>(hashes.size())};
        CHECK(side.here.one(header, payload).header.status == side.there.one(header, payload).header.status);
      } else if (what < 7) {
        const std::array<std::uint32_t, 1> tables{side.table};
        const std::array<wire::Frame, 2> payload{wire::Frame(), std::as_bytes(std::span(tables))};
        const Header header{
            .op = Op::kTick, .sequence = std::uint64_t{1} << 63U, .clock = side.clock, .aux = 1};
        CHECK(side.here.send(header, payload).front().header.status == Status::kOk);
        CHECK(side.there.send(header, payload).front().header.status == Status::kOk);
        ++side.clock;
      } else {
        copy_arcs(both, arcs);
        sides[0].here.epoch = sides[1].here.epoch = sides[2].here.epoch = 1;
      }
    }
    const auto section = [](const Service& service, std::uint32_t table, std::uint32_t slot) {
      std::vector<std::byte> bytes;
      service.snapshot(table)->section(Slot{slot}, bytes);
      return bytes;
    };
    for (std::uint32_t slot = 0; slot < 8; ++slot) {
      CHECK(section(both, 0, slot) == section(first, 0, slot));
      CHECK(section(both, 1, slot) == section(second, 1, slot));
    }
    CHECK_EQ(both.snapshot(0)->step(), first.snapshot(0)->step());
    CHECK_EQ(both.snapshot(1)->step(), second.snapshot(1)->step());
  }
}

// A table's own clock goes on from where the jobs before have left it, and no job turns it back.
TEST(the_clock_of_a_table_continues_in_a_named_job) {
  Service service(Slots(8), {{0, 8}});
  add_table(service, 0, sgd(1));
  start_job(service, kJob, Mode::kAsp, 0, false);
  admit(service, 0, 1, 0);
  Peer1 zero{service};
  for (std::uint32_t clock = 0; clock < 7; ++clock) {
    zero.tick(clock);
  }
  start_job(service, kOther, Mode::kAsp, 0, false, 0, true);
  admit(service, 0, 1, 0, kOther);
  Peer1 other{service, 0, 1, 0, kOther};
  const auto clock_of = [](Peer1& peer, std::uint32_t clock) {
    const Header header{.op = Op::kStats, .sequence = std::uint64_t{1} << 63U, .clock = clock};
    std::array<std::byte, sizeof(Header)> head;
    Header sent = header;
    sent.worker = peer.rank;
    sent.incarnation = peer.incarnation;
    sent.job = peer.job;
    sent.epoch = peer.epoch;
    wire::encode(sent, {}, head);
    const std::array<wire::Frame, 1> frames{head};
    ReplyQueue out(peer.pool);
    peer.service.handle("peer", frames, out);
    wire::Decoded decoded;
    const std::array<wire::Frame, 2> back{wire::Frame(out.replies().front().header),
                                          out.replies().front().payload[0].bytes()};
    CHECK(!wire::decode(back, {.payload_bytes = 1U << 20U, .replies = true}, decoded));
    return decoded.numbers.back();
  };
  CHECK_EQ(clock_of(zero, 7), 7);
  CHECK_EQ(clock_of(other, 0), 7);
  for (std::uint32_t clock = 0; clock < 4; ++clock) {
    other.tick(clock);
  }
  CHECK_EQ(clock_of(other, 4), 11);
  CHECK_EQ(clock_of(zero, 7), 7);
  copy_arcs(service, {{0, 8}});
  other.epoch = zero.epoch = 1;
  CHECK_EQ(clock_of(other, 4), 11);
  end_job(service, kOther);
  copy_arcs(service, {{0, 8}});
  start_job(service, kOther + 1, Mode::kAsp, 0, false, 0, true);
  admit(service, 0, 1, 0, kOther + 1);
  Peer1 third{service, 0, 1, 1, kOther + 1};
  CHECK_EQ(clock_of(third, 0), 11);
  start_job(service, kJob + 1, Mode::kAsp, 0, false, 7);
  admit(service, 0, 1, 0);
  Peer1 next{service, 0, 1, 1, kJob + 1};
  CHECK_EQ(clock_of(next, 0), 11);
  CHECK_EQ(clock_of(third, 0), 11);
}

}  // namespace shoal::service_test
