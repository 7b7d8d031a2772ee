// Endpoint: what heartbeats ask while a thread executes a request, and a primary and its backup in threads of
// their own. tests/cluster/server/test_replication.py and test_replication_moves.py have what they compute.

#include "endpoint/endpoint.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "orders.h"

namespace shoal::replicated_service_test {
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kJob = 9;
constexpr std::uint32_t kTable = 3;
constexpr StreamId kStream = 1;
constexpr std::size_t kSlots = 16;
const std::vector<SlotRange> kArcs{{0, 8}, {8, kSlots}};

using Bytes = std::vector<std::byte>;
using Frames = std::vector<Bytes>;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

Frames message(wire::Header header, const Frames& payload) {
  header.worker = 0;
  header.incarnation = 1;
  header.job = kJob;
  header.epoch = 1000;  // of a newer map than any service has
  const std::vector<wire::Frame> views(payload.begin(), payload.end());
  Bytes encoded(sizeof(header));
  wire::encode(header, views, std::span<std::byte, sizeof(header)>(encoded));
  Frames all{encoded};
  all.insert(all.end(), payload.begin(), payload.end());
  return all;
}

// A key in each of some slots.
std::vector<std::uint64_t> some_hashes(std::uint64_t number) {
  std::vector<std::uint64_t> hashes;
  for (std::uint64_t slot = number % 2; slot < kSlots; slot += 2) {
    hashes.push_back((slot << 60U) | (number / 2 % 50));
  }
  return hashes;
}

Frames push(std::uint64_t sequence) {
  const auto hashes = some_hashes(sequence);
  const std::vector<float> ones(hashes.size(), 1.0F);
  return message({.op = wire::Op::kPush,
                  .dtype = wire::Dtype::kFloat32,
                  .dim = 1,
                  .table = kTable,
                  .sequence = sequence,
                  .count = static_cast<std::uint32_t>(hashes.size())},
                 {bytes_of(hashes), bytes_of(ones)});
}

Frames pull(std::uint64_t sequence) {
  const auto hashes = some_hashes(sequence);
  return message({.op = wire::Op::kPull,
                  .dtype = wire::Dtype::kFloat32,
                  .dim = 1,
                  .table = kTable,
                  .sequence = (std::uint64_t{1} << 63U) + sequence,
                  .count = static_cast<std::uint32_t>(hashes.size())},
                 {bytes_of(hashes)});
}

void prepare(Endpoint& service) {
  add_table(service, kTable,
            TableSpec{.dim = 1,
                      .dtype = shoal::Dtype::kFloat32,
                      .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
                      .init = Init("Constant", 0.0, 0),
                      .seed = 0});
  start_job(service, kJob, Mode::kAsp, 0, false);
  admit(service, 0, 1, 0);
}

// An endpoint with a thread of its own, as a data loop is; others send it messages.
class Host {
 public:
  explicit Host(const std::vector<SlotRange>& arcs) : service(Slots(kSlots), arcs) {
    service.set_waker([this] { wake(); });
  }
  ~Host() { stop(); }
  void start(Host* backup) {
    backup_ = backup;
    thread_ = std::thread([this] { run(); });
  }
  void stop() {
    if (thread_.joinable()) {
      stopped_ = true;
      wake();
      thread_.join();
    }
    service.set_waker({});
  }
  void send(std::string peer, Frames frames) {
    const std::lock_guard lock(mutex_);
    arrived_.push_back({std::move(peer), std::move(frames)});
    changed_.notify_one();
  }
  std::size_t answered() const { return answered_; }
  // The connection of its stream is another one: what was under way is lost.
  void cut() { cut_ = true; }

  Endpoint service;

 private:
  struct Arrived {
    std::string peer;
    Frames frames;
  };
  void wake() {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }
  void deliver(ReplyQueue& out) {
    for (Reply& reply : out.replies()) {
      Frames frames{Bytes(reply.header.begin(), reply.header.end())};
      for (std::size_t i = 0; i < reply.frames; ++i) {
        const auto bytes = reply.payload.at(i).bytes();
        frames.emplace_back(bytes.begin(), bytes.end());
      }
      if (reply.peer == "worker") {
        ++answered_;
      } else {
        primary_.load()->send("backup", std::move(frames));
      }
    }
    out.replies().clear();
  }
  void run() {
    BufferPool pool;
    ReplyQueue out(pool);
    while (!stopped_) {
      std::deque<Arrived> arrived;
      {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, 1ms, [&] { return woken_ || !arrived_.empty(); });
        arrived.swap(arrived_);
        woken_ = false;
      }
      service.released(out);
      service.on_time(static_cast<Milliseconds>(std::chrono::steady_clock::now().time_since_epoch() / 1ms),
                      out);
      if (cut_.exchange(false)) {
        std::erase_if(arrived, [](const Arrived& one) { return one.peer == "backup"; });
        service.reconnected(kStream);
      }
      for (const Arrived& one : arrived) {
        const std::vector<wire::Frame> frames(one.frames.begin(), one.frames.end());
        if (one.peer == "backup") {
          service.handle_backup(kStream, frames, out);
        } else {
          service.handle(one.peer, frames, out);
        }
      }
      service.acknowledge(out);
      service.use_idle_time();
      StreamMessage sent;
      while (backup_ != nullptr && service.next_message(kStream, sent)) {
        Frames frames{Bytes(sent.header.begin(), sent.header.end())};
        for (std::size_t i = 0; i < sent.count; ++i) {
          frames.emplace_back(sent.frames.at(i).bytes.begin(), sent.frames.at(i).bytes.end());
        }
        backup_->primary_ = this;
        backup_->send("primary", std::move(frames));
      }
      deliver(out);
    }
  }

  Host* backup_ = nullptr;
  std::atomic<Host*> primary_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Arrived> arrived_;
  bool woken_ = false;
  std::atomic<bool> stopped_ = false;
  std::atomic<bool> cut_ = false;
  std::atomic<std::size_t> answered_ = 0;
  std::thread thread_;
};

void eventually(auto condition) {
  while (!condition()) {
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace

TEST(a_distance_in_15_bits_is_never_too_small_and_at_most_a_512th_too_large) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t distance = i < 5000 ? static_cast<std::uint64_t>(i) : random() >> (random() % 64U);
    const std::uint16_t coded = wire::RecordHeader::coded_distance(distance);
    const std::uint64_t read = wire::RecordHeader::distance_of(coded);
    CHECK(coded <= 0x7fff);
    CHECK(read >= distance);
    CHECK(read - distance <= distance / 512 || (coded == 0x7fff && distance > std::uint64_t{1} << 40U));
    CHECK(distance > 1023 || read == distance);
  }
}

TEST(who_asks_for_figures_does_not_wait_for_a_long_request) {
  Endpoint service(Slots(kSlots), kArcs);
  prepare(service);
  const auto ask = [&](std::chrono::milliseconds patience) {
    return service.within(patience, [](const Service& asked) { return asked.arc_loads().size(); });
  };
  CHECK_EQ(ask(1ms).value(), kArcs.size());
  bool busy = false;
  service.set_waker([&] {  // is called while the service carries out an assignment
    std::thread([&] {
      busy = true;
      CHECK(!ask(1ms).has_value());
    }).join();
  });
  service.assign({.epoch = 1, .primary = kArcs});
  CHECK(busy);
  // Who has the mutex answers when it lets it go.
  std::optional<std::size_t> answer;
  std::thread asker;
  service.set_waker([&] {
    std::atomic<bool> begun = false;
    asker = std::thread([&] {
      begun = true;
      answer = ask(10s);
    });
    while (!begun) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(5ms);
  });
  service.assign({.epoch = 2, .primary = kArcs});
  asker.join();
  CHECK_EQ(answer.value(), kArcs.size());
  service.set_waker({});
}

TEST(an_endpoint_whose_replies_wait_for_a_silent_backup_turns_requests_away_at_a_limit) {
  BufferPool pool;
  Endpoint service(Slots(kSlots), kArcs, {.held_bytes = 4096});
  service.assign({.epoch = 1,
                  .primary = kArcs,
                  .outgoing = {{.stream = kStream, .address = "inproc://b", .in_sync = kArcs}}});
  prepare(service);
  const auto replies = [&](const Frames& message) {
    ReplyQueue out(pool);
    const std::vector<wire::Frame> frames(message.begin(), message.end());
    service.handle("worker", frames, out);
    std::vector<wire::Status> statuses;
    for (const Reply& reply : out.replies()) {
      wire::Header header;
      std::memcpy(&header, reply.header.data(), sizeof(header));
      statuses.push_back(header.status);
    }
    return statuses;
  };
  CHECK(replies(push(1)).empty());  // held
  std::uint64_t sequence = 0;
  std::vector<wire::Status> last;
  while (last.empty() && sequence < 100) {
    last = replies(pull(++sequence));
  }
  CHECK(last == std::vector{wire::Status::kOverloaded});
  const std::size_t held = service.replication().held;
  CHECK(held > 2);
  const auto before = service.metrics().requests;
  CHECK(replies(push(2)) == std::vector{wire::Status::kOverloaded});  // and is not executed
  CHECK_EQ(service.replication().held, held);
  CHECK_EQ(service.position(), service.replication().position);
  service.assign({.epoch = 2, .primary = kArcs});  // without its backup it answers
  CHECK(replies(push(2)) == std::vector{wire::Status::kOk});
  CHECK(before[static_cast<std::size_t>(wire::Op::kPush)] == 1);
}

TEST(a_primary_and_its_backup_in_threads_of_their_own_are_equal_after_cuts_and_a_copy) {
  constexpr std::size_t kCalls = 400;
  Host primary(kArcs);
  Host backup({});
  prepare(primary.service);
  backup.start(nullptr);
  primary.start(&backup);
  std::size_t sent = 0;
  const auto call = [&](std::size_t count) {
    for (const std::size_t end = sent + count; sent < end; ++sent) {
      primary.send("worker", sent % 3 == 2 ? pull(sent) : push(sent + 1));
      eventually([&] { return primary.answered() + 16 > sent; });  // no more than a window's
    }
    eventually([&] { return primary.answered() >= sent; });
  };
  call(kCalls);
  // The arcs are copied while the worker goes on, one after the other.
  std::vector<SlotRange> in_sync;
  for (std::uint32_t epoch = 2; in_sync.size() < kArcs.size(); ++epoch) {
    const SlotRange next = kArcs.at(in_sync.size());
    primary.service.assign({.epoch = epoch,
                            .primary = kArcs,
                            .outgoing = {{.stream = kStream, .in_sync = in_sync, .arriving = {next}}}});
    backup.service.assign({.epoch = epoch, .incoming = {{.stream = kStream, .in_sync = in_sync}}});
    call(kCalls / 4);
    eventually([&] { return !primary.service.replication().streams.at(0).arrived.empty(); });
    in_sync.push_back(next);
  }
  primary.service.assign(
      {.epoch = 9, .primary = kArcs, .outgoing = {{.stream = kStream, .in_sync = in_sync}}});
  backup.service.assign({.epoch = 9, .incoming = {{.stream = kStream, .in_sync = in_sync}}});
  for (int cut = 0; cut < 4; ++cut) {
    primary.cut();  // loses acknowledgements
    call(kCalls / 4);
    CHECK(primary.service.within(
        1s, [](const Service& asked) { return asked.arc_loads(); }));  // as heartbeats do
  }
  eventually([&] { return primary.service.committed(primary.service.position()); });
  CHECK_EQ(primary.service.replication().streams.at(0).fault, std::string());
  const auto state = primary.service.save_arc(kArcs[0]);
  primary.stop();  // it is killed: the backup serves
  backup.service.assign({.epoch = 10, .primary = kArcs});
  CHECK(backup.service.save_arc(kArcs[0]) == state);
  CHECK(backup.service.snapshot(kTable)->size() > kSlots);
  backup.send("worker", push(sent + 1));
  eventually([&] { return backup.answered() == 1; });
}

}  // namespace shoal::replicated_service_test
