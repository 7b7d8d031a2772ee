#include "server/stream_sockets.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

namespace shoal {

namespace {

constexpr Milliseconds kNever = std::numeric_limits<Milliseconds>::max();
constexpr int kReconnectMs = 20;  // between attempts of libzmq's, with back-off
constexpr int kMaxReconnectMs = 200;
constexpr int kHandshakeMs = 5000;
constexpr std::int64_t kMaxReplyBytes = std::int64_t{64} << 10U;

std::atomic<std::uint64_t> monitors{0};  // for their names

extern "C" void release_owner(void* /*data*/, void* hint) {
  delete static_cast<std::shared_ptr<const void>*>(hint);
}

}  // namespace

// A DEALER and its monitor.
struct StreamSockets::Connection {
  Connection(const Zmq& zmq, void* context, const StreamTarget& target, const StreamSocketOptions& options)
      : zmq_(zmq),
        dealer(zmq, context, zmq::kDealer, "no socket for the backup at " + target.address),
        monitor(zmq, context, zmq::kPair, "no socket for a monitor") {
    dealer.set(zmq::kLinger, 0);
    dealer.set(zmq::kSendHighWater, 0);
    // No limit: libzmq 4.3.5 aborts the process at the next heartbeat if a peer resets a connection whose reading was
    // suspended at the limit.
    dealer.set(zmq::kReceiveHighWater, 0);
    dealer.set(zmq::kMaxMessage, &kMaxReplyBytes, sizeof kMaxReplyBytes);
    dealer.set(zmq::kReconnectInterval, kReconnectMs);
    dealer.set(zmq::kMaxReconnectInterval, kMaxReconnectMs);
    dealer.set(zmq::kHandshakeInterval, kHandshakeMs);
    dealer.set_heartbeats(kHeartbeatMs, kSilentMs);
    if (target.address.find('[') != std::string::npos) {
      dealer.set(zmq::kIpv6, 1);
    }
    if (!options.curve_secret.empty()) {
      // All servers of a cluster have the same pair of keys, unless the target has another one.
      dealer.set(zmq::kCurveServerKey, target.server_key.empty() ? options.curve_public : target.server_key);
      dealer.set(zmq::kCurvePublicKey, options.curve_public);
      dealer.set(zmq::kCurveSecretKey, options.curve_secret);
    }
    monitor.set(zmq::kLinger, 0);
    monitor.set(zmq::kReceiveHighWater, 0);  // libzmq's thread would block while it is not read
    const std::string name =
        "inproc://shoal-stream-" + std::to_string(getpid()) + "-" + std::to_string(monitors.fetch_add(1));
    // Events of failed handshakes are not requested: when libzmq 4.3.5 reports one, it overwrites the error that it handles,
    // treats the connection as full, and ends the process at its next heartbeat.
    if (zmq.monitor(dealer.get(), name.c_str(), zmq::kEventDisconnected) != 0 ||
        zmq.connect(monitor.get(), name.c_str()) != 0) {
      dealer.fail("no monitor for the backup at " + target.address);
    }
    if (zmq.connect(dealer.get(), target.address.c_str()) != 0) {
      dealer.fail("cannot connect to the backup at " + target.address);
    }
  }
  ~Connection() {
    zmq_.monitor(dealer.get(), nullptr, 0);  // first: an unread event would block libzmq's thread
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const Zmq& zmq_;
  const Socket dealer;
  const Socket monitor;
};

struct StreamSockets::Stream {
  explicit Stream(StreamTarget to) : target(std::move(to)) {}

  StreamTarget target;
  std::unique_ptr<Connection> connection;  // null until open_at
  Milliseconds open_at = 0;
  Milliseconds pause = kMinPauseMs;  // before the next socket
  Milliseconds quiet_at = 0;         // when the connection is replaced, if it has delivered no valid reply
  Milliseconds quiet = kMinQuietMs;
};

StreamSockets::StreamSockets(const Zmq& zmq, void* context, ReplicatedService& service,
                             StreamSocketOptions options)
    : zmq_(zmq), context_(context), service_(service), options_(std::move(options)), received_(zmq_) {}

StreamSockets::~StreamSockets() = default;

bool StreamSockets::update(Milliseconds now) noexcept {
  const std::uint64_t version = service_.targets_version();
  if (version != version_) {
    try {
      const std::vector<StreamTarget> targets = service_.targets();
      std::vector<std::unique_ptr<Stream>> next;
      next.reserve(targets.size());
      for (const StreamTarget& target : targets) {
        const auto same = std::ranges::find_if(streams_, [&](const std::unique_ptr<Stream>& stream) {
          return stream != nullptr && stream->target.stream == target.stream &&
                 stream->target.address == target.address && stream->target.server_key == target.server_key;
        });
        // Only then is a stream taken from the list, so that an exception below loses none.
        next.push_back(same == streams_.end() ? std::make_unique<Stream>(target) : nullptr);
      }
      for (std::size_t i = 0; i < targets.size(); ++i) {
        for (std::unique_ptr<Stream>& stream : streams_) {
          if (next[i] == nullptr && stream != nullptr && stream->target.stream == targets[i].stream) {
            next[i] = std::move(stream);
          }
        }
      }
      streams_ = std::move(next);
      version_ = version;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  for (const std::unique_ptr<Stream>& stream : streams_) {
    if (stream->connection == nullptr && stream->open_at <= now) {
      open(*stream, now);
    }
  }
  return true;
}

void StreamSockets::open(Stream& stream, Milliseconds now) noexcept {
  try {
    stream.connection = std::make_unique<Connection>(zmq_, context_, stream.target, options_);
    stream.quiet_at = now + stream.quiet;
    ++counts_.connections;
    service_.reconnected(stream.target.stream);
  } catch (const std::exception&) {  // no socket, no memory; or the context has ended, as the loop will see
    ++counts_.failed;
    drop(stream, now);
  }
}

void StreamSockets::drop(Stream& stream, Milliseconds now) noexcept {
  stream.connection.reset();
  stream.open_at = now + stream.pause;
  stream.pause = std::min(2 * stream.pause, kMaxPauseMs);
}

bool StreamSockets::has_ended(Stream& stream) noexcept {
  // DISCONNECTED is the only event that is requested.
  const bool ended =
      received_.receive(stream.connection->monitor.get()) == MultipartMessage::Result::kMessage;
  received_.clear();
  return ended;
}

bool StreamSockets::exchange(Milliseconds now, ReplyQueue& out) noexcept {
  bool more = false;
  for (const std::unique_ptr<Stream>& stream : streams_) {
    if (stream->connection == nullptr) {
      continue;
    }
    // Acknowledgements that arrived before the end are valid.
    more |= receive(*stream, now, out);
    const bool is_quiet = stream->quiet_at <= now;
    if (is_quiet) {
      stream->quiet = std::min(2 * stream->quiet, kMaxQuietMs);
    }
    if (has_ended(*stream) || is_quiet) {
      drop(*stream, now);
      continue;
    }
    int sent = 0;
    StreamMessage message;
    while (sent < kMaxMessages && service_.next_message(stream->target.stream, message)) {
      if (!send(*stream, message)) {
        ++counts_.failed;
        drop(*stream, now);
        break;
      }
      ++sent;
    }
    more |= sent == kMaxMessages;
  }
  return more;
}

bool StreamSockets::receive(Stream& stream, Milliseconds now, ReplyQueue& out) noexcept {
  int got = 0;
  bool is_valid = false;
  while (got < kMaxMessages &&
         received_.receive(stream.connection->dealer.get()) == MultipartMessage::Result::kMessage) {
    std::array<wire::Frame, MultipartMessage::kMaxFrames> frames;
    for (std::size_t i = 0; i < received_.count(); ++i) {
      frames.at(i) = received_.frame(i);
    }
    const auto reply = std::span(frames).first(received_.count());
    is_valid |= wire::peek(reply).has_value();
    service_.handle_backup(stream.target.stream, reply, out);
    ++got;
  }
  received_.clear();
  if (got > 0) {
    counts_.acknowledgements += static_cast<std::uint64_t>(got);
  }
  if (is_valid) {
    stream.pause = kMinPauseMs;
    stream.quiet = kMinQuietMs;
    stream.quiet_at = now + stream.quiet;
  }
  return got == kMaxMessages;
}

// False if the socket does not accept the message or there is no memory; then nothing of it was sent.
bool StreamSockets::send(Stream& stream, const StreamMessage& message) noexcept {
  // Everything that may fail for lack of memory comes first: a message that was started must be completed.
  std::array<zmq::Message, 1 + std::tuple_size_v<decltype(message.frames)>> messages;
  std::size_t made = 0;
  std::size_t bytes = 0;
  const auto fill = [&](wire::Frame frame, const std::shared_ptr<const void>* owner) {
    zmq::Message& part = messages.at(made);
    bytes += frame.size();
    if (owner == nullptr || *owner == nullptr || frame.size() < kMinSharedBytes) {
      if (zmq_.init_size(&part, frame.size()) != 0) {
        return false;
      }
      if (!frame.empty()) {
        std::memcpy(zmq_.data(&part), frame.data(), frame.size());
      }
      ++made;
      return true;
    }
    auto* const shared = new (std::nothrow) std::shared_ptr<const void>(*owner);
    if (shared == nullptr) {
      return false;
    }
    void* const data = const_cast<std::byte*>(frame.data());  // libzmq only reads it
    if (zmq_.init_data(&part, data, frame.size(), release_owner, shared) != 0) {
      delete shared;
      return false;
    }
    ++made;
    return true;
  };
  bool good = fill(message.header, nullptr);
  for (std::size_t i = 0; i < message.count && good; ++i) {
    good = fill(message.frames.at(i).bytes, &message.frames.at(i).owner);
  }
  std::size_t sent = 0;
  while (good && sent < made) {
    const int flags = sent + 1 < made ? zmq::kMore | zmq::kDontWait : zmq::kDontWait;
    if (zmq_.send_message(&messages.at(sent), stream.connection->dealer.get(), flags) >= 0) {
      ++sent;
    } else {
      good = zmq_.error() == EINTR;  // only the first frame can be refused, unless the context ends
    }
  }
  for (std::size_t i = sent; i < made; ++i) {
    zmq_.close_message(&messages.at(i));
  }
  if (good) {
    ++counts_.messages;
    counts_.bytes += bytes;
  }
  return good;
}

void StreamSockets::append(std::vector<zmq::PollItem>& items) const {
  for (const std::unique_ptr<Stream>& stream : streams_) {
    if (stream->connection != nullptr) {
      items.push_back({stream->connection->dealer.get(), 0, zmq::kPollIn, 0});
      items.push_back({stream->connection->monitor.get(), 0, zmq::kPollIn, 0});
    }
  }
}

Milliseconds StreamSockets::next_time() const noexcept {
  Milliseconds next = kNever;
  for (const std::unique_ptr<Stream>& stream : streams_) {
    next = std::min(next, stream->connection == nullptr ? stream->open_at : stream->quiet_at);
  }
  return next;
}

}  // namespace shoal
