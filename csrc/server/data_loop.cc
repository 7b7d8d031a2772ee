#include "server/data_loop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string_view>

#include "base/check.h"

namespace shoal {

namespace {

extern "C" void release_buffer(void* /*data*/, void* hint) { PooledBuffer::release(hint); }

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
}

}  // namespace

// An eventfd, which makes poll() return from another thread.
class DataLoop::EventFd {
 public:
  EventFd() : file_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (file_ < 0) {
      throw TransportError(std::string("no eventfd for a data loop: ") + std::strerror(errno) +
                           "; raise the limit of open files (ulimit -n)");
    }
  }
  ~EventFd() { close(file_); }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int file() const noexcept { return file_; }
  void signal() const noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(
        !write(file_, &one, sizeof(one)));  // fails only if the counter is full; then poll() returns anyway
  }
  void drain() const noexcept {
    std::uint64_t counter = 0;
    static_cast<void>(!read(file_, &counter, sizeof(counter)));
  }

 private:
  int file_;
};

// Written by the thread alone.
struct DataLoop::Counts {
  using Count = std::atomic<std::uint64_t>;
  static void add(Count& count, std::uint64_t n = 1) noexcept {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  Count requests{0}, request_bytes{0}, replies{0}, reply_bytes{0}, dropped_gone{0}, dropped_full{0},
      overloaded{0}, failed{0}, wakes{0};
};

struct DataLoop::Memory {
  BufferPool pool;
  ReplyQueue replies{pool};
};

// A socket that is closed at the end of its scope, in the thread that made it.
class DataLoop::Socket {
 public:
  Socket(const Zmq& zmq, void* context, const LoopOptions& options)
      : zmq_(zmq), socket_(zmq.socket(context, zmq::kRouter)) {
    if (socket_ == nullptr) {
      fail("no socket for " + options.address, "");
    }
    try {
      prepare(options);
    } catch (...) {
      close();
      throw;
    }
  }
  ~Socket() { close(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void* get() const noexcept { return socket_; }

  std::string address() const {
    std::array<char, 1024> bound{};
    std::size_t bytes = bound.size();
    if (zmq_.get(socket_, zmq::kLastEndpoint, bound.data(), &bytes) != 0) {
      fail("the bound address is not known", "");
    }
    return bound.data();
  }

 private:
  void close() noexcept { zmq_.close(socket_); }

  [[noreturn]] void fail(const std::string& what, const std::string& remedy) const {
    throw TransportError(what + ": " + zmq_.error_text(zmq_.error()) + remedy);
  }

  void set(int option, const void* value, std::size_t bytes) const {
    if (zmq_.set(socket_, option, value, bytes) != 0) {
      const auto all = zmq::names();
      const auto named =
          std::find_if(all.begin(), all.end(), [&](const auto& pair) { return pair.second == option; });
      fail("libzmq does not take the option " + std::string(named->first), "");
    }
  }
  void set(int option, int value) const { set(option, &value, sizeof(value)); }
  void set(int option, std::string_view value) const { set(option, value.data(), value.size()); }

  void prepare(const LoopOptions& options) const {
    set(zmq::kLinger, options.linger_ms);
    set(zmq::kBacklog, 1024);  // a thousand workers may connect at once
    const auto most = static_cast<std::int64_t>(options.max_message);
    set(zmq::kMaxMessage, &most, sizeof(most));
    // No limit: libzmq 4.3.5 aborts the process at the next heartbeat if a peer resets a connection whose reading was
    // suspended at the limit.
    set(zmq::kReceiveHighWater, 0);
    set(zmq::kSendHighWater, options.replies_per_peer);
    set(zmq::kRouterMandatory, 1);
    if (options.heartbeat_ms > 0) {
      set(zmq::kHeartbeatInterval, options.heartbeat_ms);
      set(zmq::kHeartbeatTimeout, options.dead_after_ms);
      set(zmq::kHeartbeatTtl, options.dead_after_ms);
    }
    if (options.address.find('[') != std::string::npos) {
      set(zmq::kIpv6, 1);
    }
    if (!options.curve_secret.empty()) {
      set(zmq::kCurveServer, 1);
      set(zmq::kCurveSecretKey, options.curve_secret);
      set(zmq::kZapDomain, options.zap_domain);
      set(zmq::kZapEnforceDomain, 1);  // without a ZAP handler every connection is refused
    }
    if (zmq_.bind(socket_, options.address.c_str()) != 0) {
      fail("cannot serve at " + options.address,
           "; choose an address of this machine, and a port that is free (0 for any)");
    }
  }

  const Zmq& zmq_;
  void* const socket_;
};

DataLoop::DataLoop(const Zmq& zmq, void* context, ReplicatedService& service, LoopOptions options)
    : zmq_(zmq),
      context_(context),
      service_(service),
      options_(std::move(options)),
      memory_(std::make_unique<Memory>()),
      wake_event_(std::make_unique<EventFd>()),
      counts_(std::make_unique<Counts>()) {
  SHOAL_CHECK(options_.heartbeat_ms <= 0 || options_.dead_after_ms > options_.heartbeat_ms,
              "dead_after_ms must exceed heartbeat_ms");
  service_.set_waker([this] { wake(); });
  std::mutex mutex;
  std::condition_variable opened_changed;
  std::optional<std::string> failure;  // empty: it serves
  thread_ = std::make_unique<Thread>([&, this] {
    serve([&](std::string reason) {
      const std::lock_guard lock(mutex);
      failure = std::move(reason);
      opened_changed.notify_one();
    });
  });
  std::unique_lock lock(mutex);
  opened_changed.wait(lock, [&] { return failure.has_value(); });
  if (!failure->empty()) {
    lock.unlock();
    stop();
    throw TransportError(*failure);
  }
}

DataLoop::~DataLoop() {
  stop();
  if (!thread_->here()) {
    static_cast<void>(memory_.release());  // its lock may be held by a thread of the parent process
  }
}

void DataLoop::wake() noexcept {
  woken_.store(true, std::memory_order_release);
  wake_event_->signal();
}

void DataLoop::stop() noexcept {
  if (!thread_->here()) {
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
          .unsent_bytes = memory_->pool.used_bytes()};
}

// Calls `opened` once, with "" or with the error; what it refers to does not exist afterwards.
void DataLoop::serve(const std::function<void(std::string)>& opened) noexcept {
  std::unique_ptr<Socket> socket;
  try {
    socket = std::make_unique<Socket>(zmq_, context_, options_);
    address_ = socket->address();
  } catch (const std::exception& error) {
    socket.reset();  // before the caller continues, which may end the context
    opened(error.what());
    return;
  }
  running_.store(true, std::memory_order_release);
  opened({});
  MultipartMessage parts(zmq_);
  while (!stop_.load(std::memory_order_acquire)) {
    if (woken_.exchange(false, std::memory_order_acq_rel)) {
      Counts::add(counts_->wakes);
      reply_to(*socket, [this] { service_.released(memory_->replies); });
    }
    const MultipartMessage::Result got = parts.receive(socket->get());
    if (got == MultipartMessage::Result::kMessage) {
      answer(*socket, parts);
    } else if (got == MultipartMessage::Result::kClosed) {
      break;
    } else {
      std::array<zmq::PollItem, 2> items{
          {{socket->get(), 0, zmq::kPollIn, 0}, {nullptr, wake_event_->file(), zmq::kPollIn, 0}}};
      zmq_.poll(items.data(), static_cast<int>(items.size()), -1);
      if (items[1].revents != 0) {
        wake_event_->drain();
      }
    }
    parts.clear();
  }
  parts.clear();
  socket.reset();
  running_.store(false, std::memory_order_release);
}

void DataLoop::answer(Socket& socket, MultipartMessage& parts) noexcept {
  const wire::Frame peer = parts.frame(0);
  std::array<wire::Frame, MultipartMessage::kMaxFrames> frames;
  for (std::size_t i = 1; i < parts.count(); ++i) {
    frames.at(i - 1) = parts.frame(i);
  }
  Counts::add(counts_->requests);
  Counts::add(counts_->request_bytes, parts.bytes() - peer.size());
  reply_to(socket, [&] {
    service_.handle({reinterpret_cast<const char*>(peer.data()), peer.size()},
                    std::span(frames).first(parts.count() - 1), memory_->replies, &parts);
  });
}

template <class Work>
void DataLoop::reply_to(Socket& socket, const Work& work) noexcept {
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

void DataLoop::send(Socket& socket, Reply& reply) noexcept {
  const std::size_t bytes = reply.payload_bytes();
  if (bytes > 0 && memory_->pool.used_bytes() > std::max(options_.unsent_bytes, bytes)) {
    overload(reply);
    Counts::add(counts_->overloaded);
  }
  // Everything that may fail for lack of memory comes first: a message that was started must be completed.
  std::array<zmq::Message, 1 + Reply::kMaxPayloadFrames> messages;
  if (!prepare(reply, messages)) {
    Counts::add(counts_->failed);
    return;
  }
  const std::size_t count = 1 + reply.frames;
  std::size_t size = 0;
  for (std::size_t i = 0; i < count; ++i) {
    size += zmq_.size(&messages.at(i));
  }
  // If the peer is gone or its queue is full, this fails and nothing is sent. Later frames are accepted; if the peer
  // disconnects meanwhile, libzmq drops them.
  if (zmq_.send(socket.get(), reply.peer.data(), reply.peer.size(), zmq::kMore | zmq::kDontWait) < 0) {
    Counts::add(zmq_.error() == EAGAIN ? counts_->dropped_full : counts_->dropped_gone);
    for (std::size_t i = 0; i < count; ++i) {
      zmq_.close_message(&messages.at(i));
    }
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const int flags = i + 1 < count ? zmq::kMore | zmq::kDontWait : zmq::kDontWait;
    if (zmq_.send_message(&messages.at(i), socket.get(), flags) < 0) {
      zmq_.close_message(&messages.at(i));  // the context ends
    }
  }
  Counts::add(counts_->replies);
  Counts::add(counts_->reply_bytes, size);
}

// Makes the header and the frames libzmq messages. False if there is no memory; then there are none.
bool DataLoop::prepare(Reply& reply, std::span<zmq::Message> messages) noexcept {
  if (zmq_.init_size(&messages[0], reply.header.size()) != 0) {
    return false;
  }
  std::memcpy(zmq_.data(&messages[0]), reply.header.data(), reply.header.size());
  for (std::size_t i = 0; i < reply.frames; ++i) {
    zmq::Message& message = messages[i + 1];
    PooledBuffer& buffer = reply.payload.at(i);
    if (buffer.size() == 0) {
      zmq_.init(&message);
      continue;
    }
    std::byte* const data = buffer.data();
    const std::size_t bytes = buffer.size();
    void* const detached = buffer.detach();
    if (zmq_.init_data(&message, data, bytes, release_buffer, detached) != 0) {
      PooledBuffer::release(detached);
      for (std::size_t done = 0; done <= i; ++done) {
        zmq_.close_message(&messages[done]);
      }
      return false;
    }
  }
  return true;
}

}  // namespace shoal
