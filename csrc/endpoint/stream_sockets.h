// StreamSockets: the connections of a data loop to the backups of its endpoint, one DEALER per stream.
//
//   Endpoint::next_message -> DEALER -> backup        backup -> DEALER -> Endpoint::handle_backup
//
// Invariants
//   I1  No call waits for a peer. A DEALER has no limit for messages: the log limits what is sent and not
//       acknowledged.
//   I2  A message is sent whole or not at all; after one that was not sent, reconnected() is called before
//       the next one.
//
// Threads: one, that of the data loop.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "endpoint/endpoint.h"
#include "endpoint/reply_queue.h"
#include "transport/dealer.h"
#include "transport/multipart_message.h"
#include "transport/zmq.h"

namespace shoal {

struct StreamSocketOptions {
  std::string curve_secret{};  // of this process; empty: no encryption
  std::string curve_public{};
};

// Counts since the start.
struct StreamSocketCounts {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t acknowledgements = 0;
  std::uint64_t connections = 0;  // sockets opened
  std::uint64_t failed = 0;       // messages that were not sent, sockets that could not be opened
};

class StreamSockets {
 public:
  // Pauses before a socket is opened again.
  static constexpr Milliseconds kMinPauseMs = 20;
  static constexpr Milliseconds kMaxPauseMs = 500;
  // A connection whose peer's libzmq does not answer for so long has ended: it is cut off, or the framing of
  // its bytes is damaged. A backup that is busy answers.
  static constexpr int kHeartbeatMs = 250;
  static constexpr int kSilentMs = 1000;
  // A connection without a valid reply is replaced after so long; doubles up to the second number.
  static constexpr Milliseconds kMinQuietMs = 1000;
  static constexpr Milliseconds kMaxQuietMs = 16'000;
  // Of one stream in one call.
  static constexpr int kMaxMessages = 64;

  StreamSockets(const Zmq& zmq, void* context, Endpoint& service, StreamSocketOptions options);
  ~StreamSockets();
  StreamSockets(const StreamSockets&) = delete;
  StreamSockets& operator=(const StreamSockets&) = delete;

  bool empty() const noexcept { return streams_.empty(); }

  // Opens and closes sockets as the service's targets say. False if there is no memory for them: call it
  // again.
  bool update(Milliseconds now) noexcept;
  // Sends the messages that the service has and passes it the acknowledgements that have arrived. Whether
  // there may be more.
  bool exchange(Milliseconds now, ReplyQueue& out) noexcept;
  // Appends what a poll has to wait for.
  void append(std::vector<zmq::PollItem>& items) const;
  // When to call update() at the latest; the greatest number: when the targets change.
  Milliseconds next_time() const noexcept;

  const StreamSocketCounts& counts() const noexcept { return counts_; }

 private:
  struct Stream;

  void open(Stream& stream, Milliseconds now) noexcept;
  void drop(Stream& stream, Milliseconds now) noexcept;
  bool send(Stream& stream, const StreamMessage& message) noexcept;
  bool receive(Stream& stream, Milliseconds now, ReplyQueue& out) noexcept;

  const Zmq zmq_;
  void* const context_;
  Endpoint& service_;
  const StreamSocketOptions options_;
  std::uint64_t version_ = std::numeric_limits<std::uint64_t>::max();  // of the targets
  std::vector<std::unique_ptr<Stream>> streams_;
  MultipartMessage received_;
  StreamSocketCounts counts_;
};

}  // namespace shoal
