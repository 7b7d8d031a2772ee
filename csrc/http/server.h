// HttpServer: HTTP/1.1 over TCP, with limits on what clients can hold up.
//
//   silent     no request yet, or the next one has not begun   closed after the request time
//   arriving   a request has begun                             408 and closed after the request time
//   answered   the request is whole                            as long as the answer takes
//   stalled    the client does not take the answer             closed after the request time without progress
//
// Above the limit of connections the oldest silent one makes room, then the oldest that is arriving or
// stalled; if there is none, the new one is refused with 503. Without descriptors, new connections wait.
//
// A request is answered by the FastHandler, or else by a thread that takes it from here: the I/O thread never
// waits for Python. The requests of a connection are answered one after the other.
//
// Threads: any. The server has an I/O thread, and others in which a FastHandler answers large requests.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "http/byte_budget.h"
#include "http/call_queue.h"
#include "http/counters.h"
#include "http/message.h"

namespace shoal {

struct HttpOptions {
  std::string host = "127.0.0.1";  // a numeric address, or a name; with a colon: of IPv6; empty: all of IPv4
  std::uint16_t port = 0;          // 0: any that is free
  bool reuse_port = false;         // whether several processes may listen there
  int backlog = 1024;
  std::size_t connections = 1024;
  std::size_t waiting = 1024;  // requests of a lane that wait for threads; a further one is answered 503
  std::uint64_t body_bytes = std::uint64_t{64} << 20U;
  std::chrono::nanoseconds request_time = std::chrono::seconds(30);
  std::size_t threads = 1;  // in which a FastHandler answers large requests
  // What the path of a prediction ends with, if its method is POST: these are counted, and have a lane.
  std::vector<std::string> predictions;
};

class HttpServer {
 public:
  static constexpr std::size_t kSmall = 8U << 10U;      // bytes of a body that the I/O thread has answered
  static constexpr std::uint32_t kHead = 64U << 10U;    // bytes of headers
  static constexpr std::chrono::seconds kLingering{1};  // for a client to read why its connection is closed
  static constexpr std::size_t kMostLingering = 16;
  static constexpr std::chrono::seconds kDescriptorPause{1};

  // Listens. Throws std::system_error if it cannot.
  HttpServer(HttpOptions options, std::shared_ptr<ByteBudget> budget);
  ~HttpServer();  // ends without waiting for requests; in a child process it leaves all as it is
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::uint16_t port() const noexcept;
  const HttpCounters& counters() const noexcept;
  std::size_t waiting() const;  // requests

  // What answers from the next request on; null: nothing does. Requests in progress end with what they began
  // with.
  void set_fast(std::shared_ptr<FastHandler> handler);

  // A request that is to be answered, see CallQueue. After stop() there is none.
  std::optional<CallQueue::Taken> take(HttpLane lane, std::chrono::steady_clock::time_point end);
  // The request of this number, to be answered and finished; null if there is none.
  std::shared_ptr<HttpCall> taken_back(std::uint64_t id);

  // Accepts no more connections, completes the requests that have begun and closes each connection after its
  // answer; closes what is left at `end`. Others must take and answer meanwhile. Further calls wait too.
  void stop(std::chrono::steady_clock::time_point end);
  bool stopped() const;

 private:
  class Running;
  std::unique_ptr<Running> running_;
};

}  // namespace shoal
