//   peer -> ROUTER -> frames -> Endpoint::handle -> ReplyQueue -> ROUTER -> peers
//   a control call, in another thread -> Endpoint -> wake() -> released() -> ReplyQueue -> ROUTER -> peers
//   Endpoint <-> StreamSockets (endpoint/stream_sockets.h) <-> backups

#include "endpoint/data_loop.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <string_view>

#include "base/check.h"
#include "base/mutex.h"
#include "transport/outgoing_message.h"
#include "wire/times.h"

namespace shoal {

namespace {

// Replaces a reply by OVERLOADED: the peer asks again after a pause.
void overload(Reply& reply) {
  wire::Header header;
  std::memcpy(&header, reply.header.data(), sizeof(header));
  header.status = wire::Status::kOverloaded;
  header.dtype = wire::Dtype::kNone;
  header.count = 0;
  header.aux = 0;
  wire::encode(header, {}, reply.header);
  reply.payload = {};
  reply.frames = 0;
  reply.received_ns = 0;
}

Milliseconds steady_now() noexcept {
  using namespace std::chrono;
  return static_cast<Milliseconds>(
      duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count());
}

std::uint64_t steady_now_ns() noexcept {
  using namespace std::chrono;
  return static_cast<std::uint64_t>(
      duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

// In milliseconds from now, rounded up; -1: without an end.
long timeout_until(Milliseconds time, Milliseconds now) noexcept {
  constexpr Milliseconds kLongest = 3'600'000;
  if (time == ReplicationLog::kNever) {
    return -1;
  }
  return time <= now ? 0 : static_cast<long>(std::min(time - now + 1, kLongest));
}

}  // namespace

// Written by the thread alone.
struct DataLoop::Counts {
  using Count = std::atomic<std::uint64_t>;
  static void add(Count& count, std::uint64_t n = 1) noexcept {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  Count requests{0}, request_bytes{0}, replies{0}, reply_bytes{0}, dropped_gone{0}, dropped_full{0},
      overloaded{0}, failed{0}, wakes{0}, stream_messages{0}, stream_bytes{0}, acknowledgements{0},
      connections{0}, stream_failures{0};
};

struct DataLoop::Memory {
  BufferPool pool;
  ReplyQueue replies{pool};
};

DataLoop::DataLoop(const Zmq& zmq, void* context, Endpoint& service, LoopOptions options)
    : zmq_(zmq),
      context_(context),
      service_(service),
      options_(std::move(options)),
      memory_(std::make_unique<Memory>()),
      wake_event_(std::make_unique<EventFd>("a data loop")),
      counts_(std::make_unique<Counts>()),
      durations_(std::make_unique<DurationHistograms>()) {
  SHOAL_CHECK(options_.heartbeat_ms <= 0 || options_.dead_after_ms > options_.heartbeat_ms,
              "dead_after_ms must exceed heartbeat_ms");
  service_.set_clock(&steady_now_ns);
  Mutex mutex;
  CondVar opened_changed;
  std::optional<std::string> failure;  // empty: it serves
  thread_ = std::make_unique<Thread>([&, this] {
    serve([&](std::string reason) {
      const MutexLock lock(mutex);
      failure = std::move(reason);
      opened_changed.notify_one();
    });
  });
  {
    const MutexLock lock(mutex);
    while (!failure) {
      opened_changed.wait(mutex);
    }
  }
  if (!failure->empty()) {
    stop();
    throw TransportError(*failure);
  }
  // Last: an object that could not be made must not be called. What was queued before is sent now.
  service_.set_waker([this] { wake(); });
  wake();
}

DataLoop::~DataLoop() {
  stop();
  if (!thread_->is_of_this_process()) {
    static_cast<void>(memory_.release());  // its lock may be held by a thread of the parent process
  }
}

void DataLoop::wake() noexcept {
  woken_.store(true, std::memory_order_release);
  wake_event_->signal();
}

void DataLoop::stop() noexcept {
  if (!thread_->is_of_this_process()) {
    return;
  }
  service_.set_waker({});
  stop_.store(true, std::memory_order_release);
  wake_event_->signal();
  thread_->join();
}

LoopMetrics DataLoop::metrics() const noexcept {
  const auto now = [](const Counts::Count& count) { return count.load(std::memory_order_relaxed); };
  return {.requests = now(counts_->requests),
          .request_bytes = now(counts_->request_bytes),
          .replies = now(counts_->replies),
          .reply_bytes = now(counts_->reply_bytes),
          .dropped_gone = now(counts_->dropped_gone),
          .dropped_full = now(counts_->dropped_full),
          .overloaded = now(counts_->overloaded),
          .failed = now(counts_->failed),
          .wakes = now(counts_->wakes),
          .unsent_bytes = memory_->pool.used_bytes(),
          .stream_messages = now(counts_->stream_messages),
          .stream_bytes = now(counts_->stream_bytes),
          .acknowledgements = now(counts_->acknowledgements),
          .connections = now(counts_->connections),
          .stream_failures = now(counts_->stream_failures)};
}

void DataLoop::prepare(const Socket& socket) const {
  socket.set(zmq::kLinger, options_.linger_ms);
  socket.set(zmq::kBacklog, 1024);  // a thousand workers may connect at once
  const auto most = static_cast<std::int64_t>(options_.max_message);
  socket.set(zmq::kMaxMessage, &most, sizeof(most));
  // No limit: libzmq 4.3.5 aborts the process at the next heartbeat if a peer resets a connection whose
  // reading was suspended at the limit.
  socket.set(zmq::kReceiveHighWater, 0);
  socket.set(zmq::kSendHighWater, options_.replies_per_peer);
  socket.set(zmq::kRouterMandatory, 1);
  socket.set_heartbeats(options_.heartbeat_ms, options_.dead_after_ms);
  if (options_.address.find('[') != std::string::npos) {
    socket.set(zmq::kIpv6, 1);
  }
  if (!options_.curve_secret.empty()) {
    socket.set(zmq::kCurveServer, 1);
    socket.set(zmq::kCurveSecretKey, options_.curve_secret);
    socket.set(zmq::kZapDomain, options_.zap_domain);
    socket.set(zmq::kZapEnforceDomain, 1);  // without a ZAP handler every connection is refused
  }
  if (zmq_.bind(socket.get(), options_.address.c_str()) != 0) {
    socket.fail("cannot serve at " + options_.address,
                "; choose an address of this machine, and a port that is free (0 for any)");
  }
}

std::string DataLoop::bound_address(const Socket& socket) const {
  std::array<char, 1024> bound{};
  std::size_t bytes = bound.size();
  if (zmq_.get(socket.get(), zmq::kLastEndpoint, bound.data(), &bytes) != 0) {
    socket.fail("the bound address is not known");
  }
  return bound.data();
}

// Calls `opened` once, with "" or with the error; what it refers to does not exist afterwards.
void DataLoop::serve(const std::function<void(std::string)>& opened) noexcept {
  std::unique_ptr<Socket> socket;
  std::unique_ptr<StreamSockets> streams;
  std::vector<zmq::PollItem> items;
  try {
    items.reserve(2);
    streams = std::make_unique<StreamSockets>(
        zmq_, context_, service_,
        StreamSocketOptions{.curve_secret = options_.curve_secret, .curve_public = options_.curve_public});
    socket = std::make_unique<Socket>(zmq_, context_, zmq::kRouter, "no socket for " + options_.address);
    prepare(*socket);
    address_ = bound_address(*socket);
  } catch (const std::exception& error) {
    socket.reset();  // before the caller continues, which may end the context
    opened(error.what());
    return;
  }
  running_.store(true, std::memory_order_release);
  opened({});
  run(*socket, *streams, items);
  streams.reset();
  socket.reset();
  running_.store(false, std::memory_order_release);
}

void DataLoop::run(const Socket& socket, StreamSockets& streams, std::vector<zmq::PollItem>& items) noexcept {
  constexpr Milliseconds kNoMemoryMs = 20;  // until the next attempt
  MultipartMessage parts(zmq_);
  Milliseconds now = 0;
  int untimed = kTimedMessages;  // messages since the time was read
  int unacknowledged = 0;        // messages since acknowledge()
  while (!stop_.load(std::memory_order_acquire)) {
    if (woken_.exchange(false, std::memory_order_acq_rel)) {
      Counts::add(counts_->wakes);
      untimed = kTimedMessages;  // the targets may have changed
      reply_to(socket, [this] { service_.released(memory_->replies); });
    }
    bool up_to_date = true;
    bool more = false;
    if (untimed >= kTimedMessages || !streams.empty()) {
      untimed = 0;
      now = steady_now();
      reply_to(socket, [&, this] {
        service_.on_time(now, memory_->replies);
        up_to_date = streams.update(now);
        more = streams.exchange(now, memory_->replies);
      });
      count(streams.counts());
    }
    const MultipartMessage::Result got = parts.receive(socket.get());
    const bool is_message = got == MultipartMessage::Result::kMessage;
    if (is_message) {
      answer(socket, parts);
      ++untimed;
      ++unacknowledged;
    } else if (got == MultipartMessage::Result::kClosed) {
      break;
    }
    parts.clear();
    if (!is_message || unacknowledged >= kMaxUnacknowledged) {
      unacknowledged = 0;
      reply_to(socket, [this] { service_.acknowledge(memory_->replies); });
    }
    if (is_message || more || service_.use_idle_time()) {
      continue;
    }
    Milliseconds next = std::min(service_.next_time(), streams.next_time());
    items.assign({{socket.get(), 0, zmq::kPollIn, 0}, {nullptr, wake_event_->file(), zmq::kPollIn, 0}});
    try {
      streams.append(items);
    } catch (const std::bad_alloc&) {
      items.resize(2);
      up_to_date = false;
    }
    next = up_to_date ? next : std::min(next, now + kNoMemoryMs);
    const Milliseconds current = next == ReplicationLog::kNever ? now : steady_now();
    zmq_.poll(items.data(), static_cast<int>(items.size()), timeout_until(next, current));
    untimed = kTimedMessages;
    if (items[1].revents != 0) {
      wake_event_->drain();
    }
  }
}

void DataLoop::count(const StreamSocketCounts& now) noexcept {
  counts_->stream_messages.store(now.messages, std::memory_order_relaxed);
  counts_->stream_bytes.store(now.bytes, std::memory_order_relaxed);
  counts_->acknowledgements.store(now.acknowledgements, std::memory_order_relaxed);
  counts_->connections.store(now.connections, std::memory_order_relaxed);
  counts_->stream_failures.store(now.failed, std::memory_order_relaxed);
}

void DataLoop::answer(const Socket& socket, MultipartMessage& parts) noexcept {
  const std::uint64_t begin = steady_now_ns();
  const wire::Frame peer = parts.frame(0);
  std::array<wire::Frame, MultipartMessage::kMaxFrames> frames;
  for (std::size_t i = 1; i < parts.count(); ++i) {
    frames.at(i - 1) = parts.frame(i);
  }
  // Before the service may take the frames. That the header is valid, it checks.
  const wire::Op op = parts.count() > 1 && frames[0].size() == sizeof(wire::Header)
                          ? static_cast<wire::Op>(frames[0][offsetof(wire::Header, op)])
                          : wire::Op::kNone;
  Counts::add(counts_->requests);
  Counts::add(counts_->request_bytes, parts.bytes() - peer.size());
  reply_to(socket, [&] {
    service_.handle({reinterpret_cast<const char*>(peer.data()), peer.size()},
                    std::span(frames).first(parts.count() - 1), memory_->replies, &parts, begin);
  });
  durations_->add(op, steady_now_ns() - begin);
}

template <class Work>
void DataLoop::reply_to(const Socket& socket, const Work& work) noexcept {
  try {
    work();
  } catch (const std::exception&) {  // no memory, not even for an error reply
    Counts::add(counts_->failed);
  }
  for (Reply& reply : memory_->replies.replies()) {
    send(socket, reply);
  }
  memory_->replies.replies().clear();
}

void DataLoop::send(const Socket& socket, Reply& reply) noexcept {
  const std::size_t bytes = reply.payload_bytes();
  if (bytes > 0 && memory_->pool.used_bytes() > std::max(options_.unsent_bytes, bytes)) {
    overload(reply);
    Counts::add(counts_->overloaded);
  }
  if (reply.received_ns != 0) {
    wire::set_times(reply.header,
                    {.server_ns = steady_now_ns() - reply.received_ns, .shard_ns = reply.shard_ns});
  }
  OutgoingMessage message(zmq_);
  bool is_complete = message.copy(reply.header);
  for (std::size_t i = 0; i < reply.frames && is_complete; ++i) {
    is_complete = message.move(reply.payload.at(i));
  }
  if (!is_complete) {
    Counts::add(counts_->failed);
    return;
  }
  // This fails if the peer is gone or its queue is full. If the peer disconnects later, libzmq drops the
  // rest.
  if (!message.send(socket.get(), std::as_bytes(std::span(reply.peer)))) {
    Counts::add(zmq_.error() == EAGAIN ? counts_->dropped_full : counts_->dropped_gone);
    return;
  }
  Counts::add(counts_->replies);
  Counts::add(counts_->reply_bytes, message.bytes());
}

}  // namespace shoal
