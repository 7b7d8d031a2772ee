// DataLoop: a server's endpoint: one thread, one ROUTER socket, one Endpoint, and the connections to its
// backups. No Python code runs between a request and its reply.
//
// Invariants
//   I1  Every message is read to its last frame, and answered or counted; none ends the process.
//   I2  The thread never waits for a peer. A reply to a peer that is gone, or does not read, is dropped and
//       counted.
//   I3  Unsent replies hold at most `unsent_bytes`, or one reply; one beyond that becomes OVERLOADED.
//   I4  The sockets are created, used and closed by the thread. After stop() they are closed.
//   I5  The service knows the time of each message: without streams to within kTimedMessages messages.
//
// Threads: wake(), metrics(), durations() and address() by any; stop() by one at a time. Fork: a child has no
// thread and no endpoint. Not bounded: messages that libzmq has read and the thread has not, each of at most
// `max_message` bytes.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/statistic.h"
#include "base/threads.h"
#include "base/units.h"
#include "endpoint/duration_histograms.h"
#include "endpoint/endpoint.h"
#include "endpoint/reply_queue.h"
#include "endpoint/stream_sockets.h"
#include "transport/event_fd.h"
#include "transport/multipart_message.h"
#include "transport/socket.h"
#include "transport/zmq.h"
#include "wire/wire.h"

namespace shoal {

struct LoopOptions {
  std::string address{};               // of any libzmq transport; tcp port 0 chooses a free one
  std::size_t max_message = 64 * MiB;  // bytes of a frame; a peer that sends more is disconnected
  std::size_t unsent_bytes = GiB;      // of replies
  int replies_per_peer = 1024;         // unsent
  int heartbeat_ms = 2000;             // 0: none
  int dead_after_ms = 10000;           // without a heartbeat
  int linger_ms = 500;                 // for replies that are unsent at stop()
  std::string curve_secret{};          // 40 characters of Z85; empty: no encryption and no authentication
  std::string curve_public{};          // with a secret: its public key, for connections to backups
  std::string zap_domain{};            // with a secret: the endpoint's name for the ZAP handler
};

// Counts since the start.
struct LoopMetrics {
  std::uint64_t requests = 0;
  std::uint64_t request_bytes = 0;  // of all frames
  std::uint64_t replies = 0;
  std::uint64_t reply_bytes = 0;
  std::uint64_t dropped_gone = 0;  // replies to peers that are gone
  std::uint64_t dropped_full = 0;  // replies to peers that do not read them
  std::uint64_t overloaded = 0;    // replies replaced for I3
  std::uint64_t failed = 0;        // requests without a reply for lack of memory
  std::uint64_t wakes = 0;
  std::uint64_t unsent_bytes = 0;     // now
  std::uint64_t stream_messages = 0;  // sent to backups
  std::uint64_t stream_bytes = 0;
  std::uint64_t acknowledgements = 0;
  std::uint64_t connections = 0;      // to backups, opened
  std::uint64_t stream_failures = 0;  // messages that were not sent, sockets that were not opened
};

inline constexpr auto kLoopStatistics = std::to_array<Statistic<LoopMetrics>>({
    {"requests", number_of<&LoopMetrics::requests>},
    {"request_bytes", number_of<&LoopMetrics::request_bytes>},
    {"replies", number_of<&LoopMetrics::replies>},
    {"reply_bytes", number_of<&LoopMetrics::reply_bytes>},
    {"dropped_gone", number_of<&LoopMetrics::dropped_gone>},
    {"dropped_full", number_of<&LoopMetrics::dropped_full>},
    {"overloaded", number_of<&LoopMetrics::overloaded>},
    {"failed", number_of<&LoopMetrics::failed>},
    {"wakes", number_of<&LoopMetrics::wakes>},
    {"unsent_bytes", number_of<&LoopMetrics::unsent_bytes>},
    {"stream_messages", number_of<&LoopMetrics::stream_messages>},
    {"stream_bytes", number_of<&LoopMetrics::stream_bytes>},
    {"acknowledgements", number_of<&LoopMetrics::acknowledgements>},
    {"connections", number_of<&LoopMetrics::connections>},
    {"stream_failures", number_of<&LoopMetrics::stream_failures>},
});

class DataLoop {
 public:
  // After so many messages acknowledgements are queued at the latest, and the time is read.
  static constexpr int kMaxUnacknowledged = 64;
  static constexpr int kTimedMessages = 16;

  // Binds and starts serving. Throws TransportError if the address cannot be bound or an option is not
  // accepted. `context` is a libzmq context. The service must outlive the loop.
  DataLoop(const Zmq& zmq, void* context, Endpoint& service, LoopOptions options);
  ~DataLoop();
  DataLoop(const DataLoop&) = delete;
  DataLoop& operator=(const DataLoop&) = delete;

  // The bound address, with the port.
  const std::string& address() const noexcept { return address_; }
  // False once the thread has ended.
  bool running() const noexcept { return running_.load(std::memory_order_acquire); }
  // Notifies the thread that a control call has produced replies. Never waits.
  void wake() noexcept;
  // Returns when the socket is closed. May be called repeatedly.
  void stop() noexcept;
  LoopMetrics metrics() const noexcept;
  // From the receipt of a request until its reply, or that it is deferred, was handed to the transport.
  const DurationHistograms& durations() const noexcept { return *durations_; }

 private:
  struct Counts;
  struct Memory;

  void prepare(const Socket& socket) const;
  std::string bound_address(const Socket& socket) const;
  void serve(const std::function<void(std::string)>& opened) noexcept;
  void run(const Socket& socket, StreamSockets& streams, std::vector<zmq::PollItem>& items) noexcept;
  void count(const StreamSocketCounts& now) noexcept;
  void answer(const Socket& socket, MultipartMessage& parts) noexcept;
  // Sends the replies that `work` has queued, even if it throws.
  template <class Work>
  void reply_to(const Socket& socket, const Work& work) noexcept;
  void send(const Socket& socket, Reply& reply) noexcept;

  const Zmq zmq_;
  void* const context_;
  Endpoint& service_;
  const LoopOptions options_;
  std::string address_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<EventFd> wake_event_;
  std::unique_ptr<Counts> counts_;
  std::unique_ptr<DurationHistograms> durations_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> woken_{false};
  std::atomic<bool> running_{false};
  std::unique_ptr<Thread> thread_;  // last: it uses all others
};

}  // namespace shoal
