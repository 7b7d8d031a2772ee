#include "transport/zmq.h"

#include <dlfcn.h>

#include <array>

namespace shoal {

namespace zmq {

std::span<const std::pair<std::string_view, int>> names() noexcept {
  static constexpr std::array<std::pair<std::string_view, int>, 30> kNames{{
      {"PAIR", kPair},
      {"DEALER", kDealer},
      {"ROUTER", kRouter},
      {"SNDMORE", kMore},
      {"DONTWAIT", kDontWait},
      {"POLLIN", kPollIn},
      {"EVENT_DISCONNECTED", kEventDisconnected},
      {"EVENT_HANDSHAKE_SUCCEEDED", kEventGreeted},
      {"FD", kFile},
      {"LINGER", kLinger},
      {"RECONNECT_IVL", kReconnectInterval},
      {"BACKLOG", kBacklog},
      {"RECONNECT_IVL_MAX", kMaxReconnectInterval},
      {"MAXMSGSIZE", kMaxMessage},
      {"SNDHWM", kSendHighWater},
      {"RCVHWM", kReceiveHighWater},
      {"LAST_ENDPOINT", kLastEndpoint},
      {"ROUTER_MANDATORY", kRouterMandatory},
      {"IPV6", kIpv6},
      {"CURVE_SERVER", kCurveServer},
      {"CURVE_PUBLICKEY", kCurvePublicKey},
      {"CURVE_SECRETKEY", kCurveSecretKey},
      {"CURVE_SERVERKEY", kCurveServerKey},
      {"ZAP_DOMAIN", kZapDomain},
      {"HANDSHAKE_IVL", kHandshakeInterval},
      {"HEARTBEAT_IVL", kHeartbeatInterval},
      {"HEARTBEAT_TTL", kHeartbeatTtl},
      {"HEARTBEAT_TIMEOUT", kHeartbeatTimeout},
      {"ZAP_ENFORCE_DOMAIN", kZapEnforceDomain},
      {"ETERM", kErrorTerminated},
  }};
  return kNames;
}

}  // namespace zmq

namespace {

constexpr int kMajor = 4;
constexpr int kMinor = 3;

// The module stays loaded: Python never unloads one, so the handle is not kept.
class Library {
 public:
  explicit Library(const std::string& path)
      : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      throw TransportError("the module " + path +
                           " is not loaded, so the libzmq of this process is not known: import zmq first");
    }
  }
  ~Library() { dlclose(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  template <class Function>
  void find(const char* name, Function& function) const {
    void* const found = dlsym(handle_, name);
    if (found == nullptr) {
      throw TransportError(
          std::string("no function ") + name + " behind " + path_ +
          ": this pyzmq keeps libzmq to itself (it was built with a static one), and servers "
          "need a shared one: install pyzmq's wheel (pip install --only-binary pyzmq pyzmq)");
    }
    function = reinterpret_cast<Function>(found);
  }

 private:
  std::string path_;
  void* handle_;
};

}  // namespace

Zmq Zmq::of(const std::string& module) {
  const Library library(module);
  Zmq zmq{};
  library.find("zmq_version", zmq.version);
  library.find("zmq_errno", zmq.error);
  library.find("zmq_strerror", zmq.error_text);
  library.find("zmq_ctx_new", zmq.new_context);
  library.find("zmq_ctx_term", zmq.end_context);
  library.find("zmq_socket", zmq.socket);
  library.find("zmq_close", zmq.close);
  library.find("zmq_setsockopt", zmq.set);
  library.find("zmq_getsockopt", zmq.get);
  library.find("zmq_bind", zmq.bind);
  library.find("zmq_connect", zmq.connect);
  library.find("zmq_socket_monitor", zmq.monitor);
  library.find("zmq_poll", zmq.poll);
  library.find("zmq_send", zmq.send);
  library.find("zmq_msg_init", zmq.init);
  library.find("zmq_msg_init_size", zmq.init_size);
  library.find("zmq_msg_init_data", zmq.init_data);
  library.find("zmq_msg_recv", zmq.receive_message);
  library.find("zmq_msg_send", zmq.send_message);
  library.find("zmq_msg_copy", zmq.copy_message);
  library.find("zmq_msg_move", zmq.move_message);
  library.find("zmq_msg_close", zmq.close_message);
  library.find("zmq_msg_data", zmq.data);
  library.find("zmq_msg_size", zmq.size);
  library.find("zmq_msg_more", zmq.more);
  int major = 0;
  int minor = 0;
  int patch = 0;
  zmq.version(&major, &minor, &patch);
  if (major != kMajor || minor < kMinor) {
    throw TransportError("libzmq " + std::to_string(major) + "." + std::to_string(minor) + "." +
                         std::to_string(patch) + " is loaded, 4.3 or a later 4.x is needed: upgrade pyzmq");
  }
  return zmq;
}

Zmq Zmq::open(const std::string& library) {
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) == nullptr) {
    throw TransportError("no libzmq can be loaded: " + std::string(dlerror()));
  }
  return of(library);
}

}  // namespace shoal
