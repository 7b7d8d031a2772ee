// Client: a worker without Python, whose threads pull and push; tests/cluster/worker/test_channel.py uses the
// real libzmq.

#include "client/client.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "memory_zmq.h"
#include "orders.h"

namespace shoal::client_test {
using client::CallPtr;
using client::Client;
using client::Waited;

namespace {

constexpr std::size_t kSlots = 16;
constexpr std::uint32_t kJob = 9;
constexpr std::uint32_t kTable = 3;
constexpr client::Seconds kLong = 60;

std::unique_ptr<Endpoint> make_service(std::size_t first, std::size_t end, Mode mode) {
  auto service = std::make_unique<Endpoint>(Slots(kSlots), std::vector<SlotRange>{{first, end}});
  service->set_map(1, {{first, end}});
  start_job(*service, kJob, mode, 0, false);
  admit(*service, 0, 1, 0);
  add_table(*service, kTable,
            TableSpec{.dim = 1,
                      .dtype = Dtype::kFloat32,
                      .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
                      .init = Init("Zeros", 0.0, 0),
                      .seed = 0});
  return service;
}

// Two services and a client with a background thread.
struct World {
  explicit World(unsigned lost = 0, Mode mode = Mode::kAsp, client::Seconds resend_after = 0.02)
      : first(make_service(0, 8, mode)),
        second(make_service(8, kSlots, mode)),
        zmq({first.get(), second.get()}, lost) {
    client = std::make_unique<Client>(
        MemoryZmq::functions(), nullptr, client::WorkerIdentity{.rank = 0, .incarnation = 1, .job = kJob},
        client::SlotMap(1, {{"memory://0", 0}, {"memory://1", 1}}, {{0, 8, 0}, {8, kSlots, 1}}),
        client::Policy{.resend_after = resend_after,
                       .longest = std::max(0.1, resend_after),
                       .deferred_after = 0.1,
                       .pause = 0.001},
        mode == Mode::kBsp, client::ClientOptions{.timeout = kLong});
    background = std::thread([this] {
      while (client->wait_for_work()) {
        noticed += client->calls().take_noticed().size();
        client->calls().take_failed();
        client->calls().take_traced();
      }
    });
  }
  ~World() {
    client->close();
    background.join();
    client.reset();
  }

  std::unique_ptr<Endpoint> first;
  std::unique_ptr<Endpoint> second;
  MemoryZmq zmq;
  std::unique_ptr<Client> client;
  std::atomic<std::size_t> noticed{0};
  std::thread background;
};

// The keys and the rows of a call.
struct Arrays {
  explicit Arrays(std::vector<std::uint64_t> keys)
      : pool(1), batch(keys, Slots(kSlots), pool), values(batch.size(), 1.0F) {}
  client::Keyed keyed() const {
    return {.hashes = batch.hashes(), .begins = batch.offsets(), .width = 4, .dim = 1};
  }

  ThreadPool pool;
  KeyBatch batch;
  std::vector<float> values;
};

std::vector<std::uint64_t> range_of(std::size_t n) {
  std::vector<std::uint64_t> keys(n);
  std::iota(keys.begin(), keys.end(), std::uint64_t{0});
  return keys;
}

CallPtr pull(Client& client, const std::shared_ptr<Arrays>& rows, client::Terms terms = {}) {
  client::Keyed keyed = rows->keyed();
  keyed.out = std::as_writable_bytes(std::span(rows->values));
  terms.keep = rows;
  return client.submit(wire::Op::kPull, kTable, keyed, std::move(terms));
}

CallPtr push(Client& client, const std::shared_ptr<Arrays>& rows, client::Terms terms = {}) {
  client::Keyed keyed = rows->keyed();
  keyed.values = std::as_bytes(std::span<const float>(rows->values));
  terms.keep = rows;
  return client.submit(wire::Op::kPush, kTable, keyed, std::move(terms));
}

void settle(Client& client, const CallPtr& call) {
  CHECK(client.wait(*call, Client::steady_now() + kLong) == Waited::kDone);
  CHECK(call->is_done());
  CHECK(!call->failure.has_value());
}

void eventually(auto condition) {
  while (!condition()) {
    std::this_thread::yield();
  }
}

}  // namespace

TEST(a_worker_pushes_and_pulls) {
  World world(0, Mode::kAsp, kLong);
  const auto rows = std::make_shared<Arrays>(range_of(40));
  settle(*world.client, push(*world.client, rows));
  const auto read = std::make_shared<Arrays>(range_of(40));
  settle(*world.client, pull(*world.client, read));
  CHECK(std::ranges::all_of(read->values, [](float value) { return value == -1.0F; }));
  CHECK_EQ(world.client->calls().counts().under_way, 0U);
  CHECK_EQ(world.client->request_counts().resent, 0U);
}

TEST(arrays_are_released_when_a_call_is_settled_and_kept_until_then) {
  World world;
  world.zmq.pause(true);
  auto rows = std::make_shared<Arrays>(range_of(20000));  // large enough to be sent in place
  const std::weak_ptr<Arrays> kept = rows;
  const CallPtr call = push(*world.client, rows);
  rows.reset();
  CHECK(!kept.expired());
  world.zmq.pause(false);
  settle(*world.client, call);
  eventually([&] { return kept.expired(); });
}

client::CachedRows& add_cache(World& world) {
  return world.client->add_cache(std::make_unique<RowCache>(1000, 1, false),
                                 {.table = kTable, .slots = kSlots, .staleness = 2});
}

CallPtr pull(World& world, client::CachedRows& rows, const std::shared_ptr<Arrays>& read) {
  return world.client->use([&] { return rows.pull(read->batch.hashes(), read->values, read); });
}

TEST(calls_by_way_of_a_cache_are_settled_like_any_other) {
  World world;
  client::CachedRows& rows = add_cache(world);
  world.zmq.pause(true);
  const auto read = std::make_shared<Arrays>(range_of(40));
  const auto joined = std::make_shared<Arrays>(range_of(60));
  const CallPtr first = pull(world, rows, read);
  const CallPtr second = pull(world, rows, joined);  // of rows that the first one fetches, and others
  CHECK(!first->is_done() && !second->is_done());
  world.zmq.pause(false);
  settle(*world.client, second);
  CHECK(first->is_done() && rows.cache().stats().fetched == 60 && rows.cache().stats().joined == 40);
  CHECK(std::ranges::all_of(joined->values, [](float value) { return value == 0.0F; }));
  const CallPtr held =
      world.client->use([&] { return rows.push(read->batch.hashes(), std::vector<float>(40, 1.0F), {}); });
  CHECK(held->is_done() && rows.cache().sums() == 40 && !world.client->has_pushed());
  world.client->tick();
  world.client->tick();
  CHECK_EQ(rows.cache().sums(), 40U);
  world.client->tick();  // sends them
  CHECK_EQ(rows.cache().sums(), 0U);
  const auto again = std::make_shared<Arrays>(range_of(40));
  settle(*world.client, pull(world, rows, again));
  CHECK(std::ranges::all_of(again->values, [](float value) { return value == -1.0F; }));
  world.client->close();
  const auto late = std::make_shared<Arrays>(range_of(100));
  const CallPtr closed = pull(world, rows, late);
  CHECK(closed->is_done() && closed->failure->kind == client::ErrorKind::kClosed);
}

TEST(threads_pull_and_push_through_a_cache_and_every_gradient_counts_once) {
  for (const unsigned lost : {0U, 20U}) {
    World world(lost);
    client::CachedRows& rows = add_cache(world);
    constexpr std::size_t kThreads = 4;
    constexpr std::size_t kRounds = 60;
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&] {
        for (std::size_t i = 0; i < kRounds; ++i) {
          const auto read = std::make_shared<Arrays>(range_of(50));
          const CallPtr pulled = pull(world, rows, read);
          settle(*world.client, world.client->use([&] {
            return rows.push(read->batch.hashes(), std::vector<float>(50, 1.0F), {});
          }));
          settle(*world.client, pulled);
          if (i % 8 == 0) {
            world.client->tick();
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    world.client->forget_rows();
    const auto read = std::make_shared<Arrays>(range_of(50));
    const std::vector<CallPtr> after = world.client->use([&] { return rows.flush(); });
    settle(*world.client, pull(*world.client, read, {.after = after}));
    CHECK(std::ranges::all_of(read->values, [](float value) { return value == -float{kThreads * kRounds}; }));
  }
}

TEST(threads_pull_and_push_over_lossy_wires_and_every_push_counts_once) {
  for (const unsigned lost : {0U, 20U}) {
    World world(lost);
    constexpr std::size_t kThreads = 6;
    constexpr std::size_t kPushes = 60;
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937 random(static_cast<unsigned>(thread));
        std::vector<CallPtr> under_way;
        for (std::size_t i = 0; i < kPushes; ++i) {
          CallPtr pushed = push(*world.client, std::make_shared<Arrays>(range_of(50)));
          const auto read = std::make_shared<Arrays>(range_of(50));
          switch (random() % 4) {
            case 0:
              settle(*world.client, pushed);
              break;
            case 1: {  // sees the push
              settle(*world.client, pull(*world.client, read, {.follows = pushed}));
              CHECK(read->values[0] <= -1.0F);
              break;
            }
            case 2: {
              const std::vector<CallPtr> after{pushed};
              settle(*world.client, pull(*world.client, read, {.after = after}));
              CHECK(pushed->is_done());
              break;
            }
            default:
              world.client->notice(pushed);
          }
          under_way.push_back(std::move(pushed));
        }
        for (const CallPtr& call : under_way) {
          settle(*world.client, call);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    const auto read = std::make_shared<Arrays>(range_of(50));
    settle(*world.client, pull(*world.client, read));
    CHECK(std::ranges::all_of(read->values, [](float value) { return value == -float{kThreads * kPushes}; }));
    CHECK_EQ(world.client->calls().counts().under_way, 0U);
    CHECK_EQ(world.client->calls().counts().bytes_held, 0U);
  }
}

TEST(pushes_that_no_thread_waits_for_are_acknowledged) {
  World world(10);
  for (int i = 0; i < 100; ++i) {
    push(*world.client, std::make_shared<Arrays>(range_of(30)));
  }
  eventually([&] { return !world.client->calls().has_pending(); });
}

TEST(clocks_end_and_rows_of_a_clock_are_seen_in_the_next) {
  World world(0, Mode::kBsp);
  for (int clock = 0; clock < 20; ++clock) {
    const auto read = std::make_shared<Arrays>(range_of(40));
    settle(*world.client, pull(*world.client, read));
    CHECK(
        std::ranges::all_of(read->values, [&](float value) { return value == static_cast<float>(-clock); }));
    push(*world.client, std::make_shared<Arrays>(range_of(40)));
    world.client->tick();
  }
  CHECK_EQ(world.client->clock(), 20U);
}

TEST(a_client_that_is_closed_settles_the_calls_of_all_threads) {
  for (int turn = 0; turn < 20; ++turn) {
    World world;
    world.zmq.pause(turn % 2 == 0);
    std::atomic<int> begun{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (;;) {
          const CallPtr call = pull(*world.client, std::make_shared<Arrays>(range_of(10)));
          ++begun;
          const Waited waited = world.client->wait(*call, Client::steady_now() + kLong);
          CHECK(waited == Waited::kDone || waited == Waited::kClosed);
          CHECK(call->is_done());
          if (call->failure.has_value()) {
            CHECK(call->failure->kind == client::ErrorKind::kClosed);
            return;
          }
        }
      });
    }
    eventually([&] { return begun >= 4; });
    world.client->close();
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(a_wait_ends_at_its_time_and_the_call_goes_on) {
  World world;
  world.zmq.pause(true);
  const CallPtr call = pull(*world.client, std::make_shared<Arrays>(range_of(10)));
  CHECK(world.client->wait(*call, Client::steady_now() + 0.01) == Waited::kTimedOut);
  CHECK(!call->is_done());
  world.zmq.pause(false);
  settle(*world.client, call);
}

TEST(failures_that_no_thread_waits_for_are_returned_once) {
  World world;
  world.zmq.pause(true);
  const CallPtr one = push(*world.client, std::make_shared<Arrays>(range_of(10)));
  const CallPtr other = push(*world.client, std::make_shared<Arrays>(range_of(10)));
  const CallPtr read = pull(*world.client, std::make_shared<Arrays>(range_of(10)));
  world.client->fail({client::ErrorKind::kNotConnected, "cut off"});
  CHECK(one->is_done() && other->is_done() && read->is_done());
  world.client->calls().observed(*one);
  const std::vector<CallPtr> left = world.client->calls().take_unobserved();
  CHECK_EQ(left.size(), 1U);
  CHECK(left[0] == other);
  CHECK(!world.client->calls().has_unobserved());
  CHECK(push(*world.client, std::make_shared<Arrays>(range_of(10)))->failure->text == "cut off");
}

}  // namespace shoal::client_test
