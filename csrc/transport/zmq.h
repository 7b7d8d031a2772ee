// Zmq: the functions of a libzmq: of the one that pyzmq has loaded, or without Python of a library file.
//
// Algorithm. A context belongs to one copy of libzmq, and Python creates it; the loops in C++ therefore have
// to use the same copy. pyzmq's extension module is already loaded: dlsym() on its handle searches it and the
// libraries that it was linked with, and returns the functions that pyzmq itself calls. Nothing is linked.
//
//   of(module)     the functions of the module with this path; TransportError if they are not found
//   open(library)  those of a libzmq, which is loaded for the rest of the process
//   names()        the constants below by pyzmq's names, whose values a test compares
//
// A struct of function pointers, so that a test can substitute its own.
//
// Threads: immutable. A socket is created, used and closed by one thread.

#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace shoal {

// An environment error: no libzmq, an address that cannot be bound.
struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace zmq {

inline constexpr int kPair = 0;
inline constexpr int kDealer = 5;
inline constexpr int kRouter = 6;

inline constexpr int kMore = 2;  // flags of a send
inline constexpr int kDontWait = 1;

inline constexpr short kPollIn = 1;

inline constexpr int kEventDisconnected = 0x200;
inline constexpr int kEventGreeted = 0x1000;  // the handshake has succeeded

inline constexpr int kFile = 14;  // options
inline constexpr int kLinger = 17;
inline constexpr int kReconnectInterval = 18;
inline constexpr int kBacklog = 19;
inline constexpr int kMaxReconnectInterval = 21;
inline constexpr int kMaxMessage = 22;  // int64_t; the others are int
inline constexpr int kSendHighWater = 23;
inline constexpr int kReceiveHighWater = 24;
inline constexpr int kLastEndpoint = 32;
inline constexpr int kRouterMandatory = 33;
inline constexpr int kIpv6 = 42;
inline constexpr int kCurveServer = 47;
inline constexpr int kCurvePublicKey = 48;
inline constexpr int kCurveSecretKey = 49;
inline constexpr int kCurveServerKey = 50;
inline constexpr int kZapDomain = 55;
inline constexpr int kHandshakeInterval = 66;
inline constexpr int kHeartbeatInterval = 75;
inline constexpr int kHeartbeatTtl = 76;
inline constexpr int kHeartbeatTimeout = 77;
inline constexpr int kZapEnforceDomain = 93;

inline constexpr int kErrorTerminated = 156384765;  // ETERM: its number is libzmq's own

std::span<const std::pair<std::string_view, int>> names() noexcept;

// zmq_msg_t: its size and alignment are part of libzmq's interface since 4.1.
struct alignas(8) Message {
  unsigned char bytes[64];
};
static_assert(sizeof(Message) == 64);

// zmq_pollitem_t, outside Windows.
struct PollItem {
  void* socket;
  int fd;
  short events;
  short revents;
};

}  // namespace zmq

struct Zmq {
  static Zmq of(const std::string& module);
  static Zmq open(const std::string& library);

  void (*version)(int*, int*, int*);
  int (*error)();
  const char* (*error_text)(int);
  void* (*new_context)();
  int (*end_context)(void* context);  // waits until its sockets are closed
  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*set)(void* socket, int option, const void* value, std::size_t bytes);
  int (*get)(void* socket, int option, void* value, std::size_t* bytes);
  int (*bind)(void* socket, const char* address);
  int (*connect)(void* socket, const char* address);
  int (*monitor)(void* socket, const char* address, int events);  // address null: ends
  int (*poll)(zmq::PollItem*, int count, long timeout_ms);
  int (*send)(void* socket, const void* data, std::size_t bytes, int flags);
  int (*init)(zmq::Message*);
  int (*init_size)(zmq::Message*, std::size_t bytes);
  int (*init_data)(zmq::Message*, void* data, std::size_t bytes, void (*free)(void* data, void* hint),
                   void* hint);
  int (*receive_message)(zmq::Message*, void* socket, int flags);
  int (*send_message)(zmq::Message*, void* socket, int flags);
  int (*copy_message)(zmq::Message* to, zmq::Message* from);
  int (*move_message)(zmq::Message* to, zmq::Message* from);
  int (*close_message)(zmq::Message*);
  void* (*data)(zmq::Message*);
  std::size_t (*size)(const zmq::Message*);
  int (*more)(const zmq::Message*);
};

}  // namespace shoal
