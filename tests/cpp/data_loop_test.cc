// DataLoop with a fake libzmq in memory, whose functions can fail; tests/cluster/server/test_loop.py uses the
// real one.

#include "endpoint/data_loop.h"

#include <poll.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_zmq.h"
#include "orders.h"
#include "wire/times.h"

namespace shoal::data_loop_test {

namespace {

constexpr std::uint32_t kJob = 9;
constexpr std::uint32_t kTable = 3;

// A service with one table and two workers, under a fake libzmq.
struct World {
  explicit World(LoopOptions options = {}, Mode mode = Mode::kAsp) : service(Slots(16), {{0, 7}, {7, 16}}) {
    service.set_map(1, {{0, 7}, {7, 16}});
    start_job(service, kJob, mode, 0, false);
    admit(service, 0, 1, 0);
    admit(service, 1, 1, 0);
    add_table(service, kTable,
              TableSpec{.dim = 4,
                        .dtype = Dtype::kFloat32,
                        .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
                        .init = Init("Constant", 0.5, 0),
                        .seed = 0});
    options.address = "fake://any";
    loop = std::make_unique<DataLoop>(Fake::functions(), this, service, std::move(options));
  }

  Fake fake;
  Endpoint service;
  std::unique_ptr<DataLoop> loop;
};

Bytes bytes_of(std::string_view text) {
  const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

Frames message(std::string_view peer, wire::Header header, const Frames& payload) {
  header.worker = 0;
  header.incarnation = 1;
  header.job = kJob;
  header.epoch = 1;
  const std::vector<wire::Frame> views(payload.begin(), payload.end());
  Bytes encoded(sizeof(header));
  wire::encode(header, views, std::span<std::byte, sizeof(header)>(encoded));
  Frames all{bytes_of(peer), encoded};
  all.insert(all.end(), payload.begin(), payload.end());
  return all;
}

Frames pull(std::string_view peer, std::uint64_t sequence, std::uint32_t clock = 0, std::size_t keys = 5,
            std::uint16_t flags = 0) {
  std::vector<std::uint64_t> hashes(keys);
  for (std::size_t i = 0; i < keys; ++i) {
    hashes[i] = i << 50U;
  }
  return message(peer,
                 {.op = wire::Op::kPull,
                  .dtype = wire::Dtype::kFloat32,
                  .flags = flags,
                  .dim = 4,
                  .table = kTable,
                  .sequence = (std::uint64_t{1} << 63U) + sequence,
                  .clock = clock,
                  .count = static_cast<std::uint32_t>(keys)},
                 {bytes_of(hashes)});
}

wire::Header header_of(const Frames& reply) {
  wire::Header header;
  CHECK_EQ(reply.at(1).size(), sizeof(header));
  std::memcpy(&header, reply.at(1).data(), sizeof(header));
  return header;
}

void eventually(auto condition) {
  while (!condition()) {
    std::this_thread::yield();
  }
}

}  // namespace

TEST(each_request_is_answered_to_its_peer_and_no_message_is_left) {
  World world;
  CHECK_EQ(world.loop->address(), std::string("fake://bound"));
  for (std::uint64_t i = 0; i < 20; ++i) {
    world.fake.arrive(pull("peer " + std::to_string(i), i));
  }
  const auto replies = world.fake.wait(20);
  for (std::uint64_t i = 0; i < 20; ++i) {
    CHECK(replies[i].at(0) == bytes_of("peer " + std::to_string(i)));
    CHECK(header_of(replies[i]).status == wire::Status::kOk);
    CHECK_EQ(header_of(replies[i]).sequence, (std::uint64_t{1} << 63U) + i);
    CHECK(replies[i].at(2) == bytes_of(std::vector<float>(20, 0.5F)));
    CHECK_EQ(replies[i].size(), 3);
  }
  const LoopMetrics metrics = world.loop->metrics();
  CHECK_EQ(metrics.requests, 20);
  CHECK_EQ(metrics.request_bytes, 20 * (64 + 5 * 8));
  CHECK_EQ(metrics.unsent_bytes, 20 * 80);
  const DurationHistograms& durations = world.loop->durations();
  eventually([&] {
    std::uint64_t pulls = 0;
    for (std::size_t bucket = 0; bucket < DurationHistograms::kBuckets; ++bucket) {
      pulls += durations.count(static_cast<std::size_t>(wire::Op::kPull), bucket);
    }
    return pulls == 20;
  });
  CHECK(durations.total_ns(static_cast<std::size_t>(wire::Op::kPull)) > 0);
  world.fake.take();
  CHECK_EQ(world.loop->metrics().unsent_bytes, 0);
}

TEST(a_reply_without_keys_keeps_its_empty_frame) {
  World world;
  world.fake.arrive(pull("a", 1, 0, 0));
  const auto replies = world.fake.wait(1);
  CHECK_EQ(replies[0].size(), 3);
  CHECK(replies[0][2].empty());
}

TEST(frames_beyond_those_of_any_message_are_dropped_and_the_rest_refused) {
  World world;
  for (const std::size_t more : {1UL, 2UL, 3UL, 4UL, 5UL, 100UL}) {
    Frames frames = pull("a", more);
    frames.insert(frames.end(), more, bytes_of("more"));
    world.fake.arrive(frames);
    CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kBadRequest);
    world.fake.take();
  }
  world.fake.arrive({bytes_of("a")});  // a name and nothing else
  CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kBadRequest);
  eventually([&] { return world.loop->metrics().replies == 7; });
  CHECK_EQ(world.loop->metrics().requests, 7);
}

TEST(a_peer_that_has_gone_or_does_not_read_is_counted_and_others_are_served) {
  World world;
  world.fake.refuse_peer = EHOSTUNREACH;
  world.fake.arrive(pull("gone", 1));
  eventually([&] { return world.loop->metrics().dropped_gone == 1; });
  world.fake.refuse_peer = EAGAIN;
  world.fake.arrive(pull("full", 2));
  eventually([&] { return world.loop->metrics().dropped_full == 1; });
  eventually([&] { return world.loop->metrics().unsent_bytes == 0; });  // freed after it is counted
  world.fake.refuse_peer = 0;
  world.fake.arrive(pull("there", 3));
  CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kOk);
}

TEST(without_memory_for_a_message_nothing_of_it_is_sent) {
  World world;
  for (const int left : {0, 1}) {
    const std::uint64_t before = world.loop->metrics().failed;
    world.fake.memory_left = left;
    world.fake.arrive(pull("a", 1));
    eventually([&] { return world.loop->metrics().failed == before + 1; });
    CHECK(world.fake.take().empty());
    CHECK_EQ(world.loop->metrics().unsent_bytes, 0);
  }
  world.fake.memory_left = 1000;
  world.fake.arrive(pull("a", 1));
  CHECK_EQ(world.fake.wait(1)[0].size(), 3);
}

TEST(values_that_would_exceed_the_bound_are_refused_until_others_are_sent) {
  World world({.unsent_bytes = 200});
  for (std::uint64_t i = 0; i < 4; ++i) {
    world.fake.arrive(pull("a", i));  // 80 bytes each
  }
  const auto replies = world.fake.wait(4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(header_of(replies[i]).status == (i < 2 ? wire::Status::kOk : wire::Status::kOverloaded));
    CHECK_EQ(replies[i].size(), i < 2 ? 3 : 2);
    CHECK_EQ(header_of(replies[i]).sequence, (std::uint64_t{1} << 63U) + i);
    std::vector<wire::Frame> frames(replies[i].begin() + 1, replies[i].end());
    wire::Decoded decoded;
    CHECK(!wire::decode(frames, {.replies = true}, decoded));
  }
  CHECK_EQ(world.loop->metrics().overloaded, 2);
  world.fake.take();
  world.fake.arrive(pull("a", 9));
  CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kOk);
  world.fake.take();
  world.fake.arrive(pull("a", 10, 0, 1000));  // greater than the bound, but alone
  CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kOk);
}

TEST(replies_that_control_calls_release_leave_at_once) {
  World world({}, Mode::kBsp);
  world.fake.arrive(message("a", {.op = wire::Op::kTick}, {{}, {}}));
  CHECK(header_of(world.fake.wait(1)[0]).status == wire::Status::kOk);
  world.fake.arrive(pull("a", 1, 1));
  CHECK(header_of(world.fake.wait(2)[1]).status == wire::Status::kDeferred);
  std::thread([&] { dismiss(world.service, 1, 1); }).join();
  const auto replies = world.fake.wait(3);
  CHECK(replies[2].at(0) == bytes_of("a"));
  CHECK(header_of(replies[2]).status == wire::Status::kOk);
  CHECK_EQ(replies[2].at(2).size(), 80);
}

TEST(a_reply_has_the_times_of_its_request_if_that_asked_for_them) {
  World world;
  world.fake.arrive(pull("a", 1));
  world.fake.arrive(pull("a", 2, 0, 5, wire::kTimed | 0x300));
  world.fake.arrive(pull("a", 3));
  const auto replies = world.fake.wait(3);
  for (const std::size_t plain : {0UL, 2UL}) {
    CHECK_EQ(header_of(replies[plain]).flags, wire::kReply);
    CHECK_EQ(header_of(replies[plain]).aux, 0);
  }
  const wire::Header header = header_of(replies[1]);
  CHECK_EQ(header.flags, wire::kReply | wire::kTimed | 0x300);
  const wire::ServerTimes times = wire::unpack_times(header.aux);
  CHECK(times.shard_ns > 0);
  CHECK(times.server_ns >= times.shard_ns);
  const std::vector<wire::Frame> frames(replies[1].begin() + 1, replies[1].end());
  wire::Decoded decoded;
  CHECK(!wire::decode(frames, {.replies = true}, decoded));
}

TEST(the_times_of_a_deferred_pull_include_what_it_waited) {
  World world({}, Mode::kBsp);
  world.fake.arrive(message("a", {.op = wire::Op::kTick, .flags = wire::kTimed}, {{}, {}}));
  CHECK_EQ(header_of(world.fake.wait(1)[0]).flags, wire::kReply | wire::kTimed);
  world.fake.arrive(pull("a", 1, 1, 5, wire::kTimed));
  CHECK_EQ(header_of(world.fake.wait(2)[1]).flags, wire::kReply);  // deferred
  const auto deferred = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - deferred;
  std::thread([&] { dismiss(world.service, 1, 1); }).join();
  const wire::Header header = header_of(world.fake.wait(3)[2]);
  CHECK_EQ(header.flags, wire::kReply | wire::kTimed);
  const wire::ServerTimes times = wire::unpack_times(header.aux);
  const auto nanoseconds = static_cast<std::uint64_t>(waited.count());
  CHECK(times.server_ns >= nanoseconds - nanoseconds / 1024);
  CHECK(times.shard_ns > 0 && times.shard_ns < times.server_ns - nanoseconds / 2);
}

TEST(a_reply_that_was_replaced_by_a_refusal_has_no_times) {
  World world({.unsent_bytes = 100});
  for (std::uint64_t i = 0; i < 2; ++i) {
    world.fake.arrive(pull("a", i, 0, 5, wire::kTimed));  // 80 bytes each
  }
  const wire::Header header = header_of(world.fake.wait(2)[1]);
  CHECK(header.status == wire::Status::kOverloaded);
  CHECK_EQ(header.flags, wire::kReply);
  CHECK_EQ(header.aux, 0);
}

TEST(requests_wakes_metrics_and_returning_memory_meet_in_many_threads) {
  World world;
  std::atomic<bool> done{false};
  std::thread waker([&] {
    while (!done) {
      world.loop->wake();
      static_cast<void>(world.loop->metrics());
    }
  });
  std::thread control([&] {
    for (std::uint32_t i = 2; !done; ++i) {
      admit(world.service, 2, i, 0);
    }
  });
  std::thread transport([&] {
    std::size_t taken = 0;
    while (taken < 500) {
      taken += world.fake.take().size();
    }
    done = true;
  });
  for (std::uint64_t i = 0; i < 500; ++i) {
    world.fake.arrive(pull("peer", i, 0, i % 7));
  }
  transport.join();
  waker.join();
  control.join();
  eventually([&] { return world.loop->metrics().replies == 500; });  // counted after it is sent
}

TEST(memory_that_is_still_to_be_sent_outlives_the_loop) {
  World world;
  world.fake.arrive(pull("a", 1));
  world.fake.wait(1);
  world.loop.reset();
  const auto replies = world.fake.take();  // sent now
  CHECK(replies[0].at(2) == bytes_of(std::vector<float>(20, 0.5F)));
}

TEST(the_end_of_the_context_ends_the_loop_which_closes_its_socket) {
  World world;
  world.fake.arrive(pull("a", 1));
  world.fake.wait(1);
  world.fake.terminated = true;
  eventually([&] { return !world.loop->running(); });
  CHECK_EQ(world.fake.sockets, 0);
  world.loop->stop();
  world.loop->wake();
}

TEST(an_address_that_is_refused_leaves_no_socket) {
  Endpoint service(Slots(16), {{0, 7}, {7, 16}});
  Fake fake;
  fake.refuse_bind = EADDRINUSE;
  CHECK_THROWS(DataLoop(Fake::functions(), &fake, service, {.address = "fake://x"}),
               "cannot serve at fake://x: in use; choose");
  fake.refuse_bind = 0;
  fake.owner = {};
  fake.refuse_socket = EMFILE;
  CHECK_THROWS(DataLoop(Fake::functions(), &fake, service, {.address = "fake://x"}),
               "no socket for fake://x");
  CHECK_THROWS(
      DataLoop(Fake::functions(), &fake, service, {.address = "x", .heartbeat_ms = 5, .dead_after_ms = 5}),
      "must exceed heartbeat_ms");
}

TEST(a_module_that_is_not_there_or_has_no_libzmq_is_told_with_the_remedy) {
  CHECK_THROWS(Zmq::of("/nowhere/_zmq.so"), "import zmq first");
  CHECK_THROWS(Zmq::of(""), "install pyzmq's wheel");  // this program itself
}

}  // namespace shoal::data_loop_test
