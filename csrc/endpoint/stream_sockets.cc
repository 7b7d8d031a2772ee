// The targets of the Endpoint name the streams to be connected, and their addresses. A message is sent from
// the memory of its frames, which libzmq shares. A socket monitor observes the end of each connection; the
// DEALER is then closed and, after a pause that doubles while nothing is received, replaced by another one,
// over which the service sends again what was not acknowledged. Nothing is therefore sent twice over one
// connection. A connection whose peer has sent invalid data is replaced, too. libzmq repeats connection
// attempts that are refused. A connection without valid replies is replaced as well, at increasing intervals:
// bytes that were lost within it may have turned all replies into parts of one message.

#include "endpoint/stream_sockets.h"

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <utility>

namespace shoal {

namespace {

constexpr std::int64_t kMaxReplyBytes = std::int64_t{64} << 10U;

}  // namespace

struct StreamSockets::Stream {
  explicit Stream(StreamTarget to) : target(std::move(to)) {}

  StreamTarget target;
  std::unique_ptr<Dealer> connection;  // null until open_at
  Milliseconds open_at = 0;
  Milliseconds pause = kMinPauseMs;  // before the next socket
  Milliseconds quiet_at = 0;         // when the connection is replaced, if it has delivered no valid reply
  Milliseconds quiet = kMinQuietMs;
};

StreamSockets::StreamSockets(const Zmq& zmq, void* context, Endpoint& service, StreamSocketOptions options)
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
    // All servers of a cluster have the same pair of keys, unless the target has another one.
    const bool is_secure = !options_.curve_secret.empty();
    const std::string& key =
        stream.target.server_key.empty() ? options_.curve_public : stream.target.server_key;
    stream.connection = std::make_unique<Dealer>(zmq_, context_, stream.target.address,
                                                 DealerOptions{.what = "the backup",
                                                               .max_reply_bytes = kMaxReplyBytes,
                                                               .heartbeat_ms = kHeartbeatMs,
                                                               .silent_ms = kSilentMs,
                                                               .curve_server = is_secure ? key : "",
                                                               .curve_public = options_.curve_public,
                                                               .curve_secret = options_.curve_secret});
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
    if (stream->connection->has_ended() || is_quiet) {
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
  while (got < kMaxMessages && stream.connection->receive(received_) == MultipartMessage::Result::kMessage) {
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
  const std::size_t bytes =
      stream.connection->send(message.header, std::span(message.frames).first(message.count));
  counts_.messages += bytes != 0 ? 1 : 0;
  counts_.bytes += bytes;
  return bytes != 0;
}

void StreamSockets::append(std::vector<zmq::PollItem>& items) const {
  for (const std::unique_ptr<Stream>& stream : streams_) {
    if (stream->connection != nullptr) {
      items.push_back({stream->connection->socket(), 0, zmq::kPollIn, 0});
      items.push_back({stream->connection->monitor(), 0, zmq::kPollIn, 0});
    }
  }
}

Milliseconds StreamSockets::next_time() const noexcept {
  Milliseconds next = ReplicationLog::kNever;
  for (const std::unique_ptr<Stream>& stream : streams_) {
    next = std::min(next, stream->connection == nullptr ? stream->open_at : stream->quiet_at);
  }
  return next;
}

}  // namespace shoal
