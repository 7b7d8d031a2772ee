// Both ends of a request and its reply over libzmq, without Python and without a table: the least that a call can cost.
// bench/client/peers.py compiles it with csrc/transport/zmq.cc, makes the sockets with pyzmq, and passes them on.
//
// A request begins with the number of bytes of its reply. Large messages are not copied, as by pyzmq; the values of a
// reply are copied to the caller's rows.
//
// Threads: a socket belongs to the thread that calls.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "transport/zmq.h"

namespace {

using shoal::Zmq;
namespace zmq = shoal::zmq;

constexpr std::size_t kCopied = 65'536;  // bytes up to which a message is copied

double now() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The message is sent or queued; `data` stays as it is until its reply has arrived.
bool send(const Zmq& api, void* socket, void* data, std::size_t bytes) noexcept {
  zmq::Message message;
  if (bytes < kCopied) {
    if (api.init_size(&message, bytes) != 0) return false;
    std::memcpy(api.data(&message), data, bytes);
  } else if (api.init_data(&message, data, bytes, [](void*, void*) noexcept {}, nullptr) != 0) {
    return false;
  }
  if (api.send_message(&message, socket, 0) >= 0) return true;
  api.close_message(&message);
  return false;
}

}  // namespace

extern "C" {

// Answers requests until the process ends, or returns because the socket fails.
void pair_serve(const char* module, void* router) {
  const Zmq api = Zmq::of(module);
  std::vector<unsigned char> values;
  while (true) {
    std::array<zmq::Message, 2> parts;  // the peer, the request
    for (zmq::Message& part : parts) {
      api.init(&part);
      if (api.receive_message(&part, router, 0) < 0) return;
    }
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, api.data(&parts[1]), sizeof(bytes));
    if (values.size() < bytes) values.resize(bytes);
    api.close_message(&parts[1]);
    if (api.send_message(&parts[0], router, zmq::kMore) < 0) return;
    if (!send(api, router, values.data(), bytes)) return;
  }
}

// Makes requests for some seconds, at most `capacity`, `depth` of them in flight; returns their number, and the seconds
// of each from its sending to its reply. -1: a message was not sent, or a reply has other bytes.
std::int64_t pair_call(const char* module, void* dealer, void* request, std::uint64_t request_bytes,
                       void* rows, std::uint64_t reply_bytes, std::uint64_t header_bytes, std::int64_t depth,
                       double seconds, double* latencies, std::int64_t capacity) {
  const Zmq api = Zmq::of(module);
  const double end = now() + seconds;
  std::memcpy(request, &reply_bytes, sizeof(reply_bytes));
  std::int64_t sent = 0;
  std::int64_t received = 0;
  bool is_over = false;
  while (!is_over || received < sent) {
    while (!is_over && sent - received < depth) {
      latencies[sent] = now();
      if (!send(api, dealer, request, request_bytes)) return -1;
      ++sent;
      is_over = sent == capacity;
    }
    zmq::Message reply;
    api.init(&reply);
    if (api.receive_message(&reply, dealer, 0) < 0 || api.size(&reply) != reply_bytes) return -1;
    std::memcpy(rows, static_cast<const unsigned char*>(api.data(&reply)) + header_bytes,
                reply_bytes - header_bytes);
    api.close_message(&reply);
    const double time = now();
    latencies[received] = time - latencies[received];
    ++received;
    is_over = is_over || time > end;
  }
  return received;
}
}
