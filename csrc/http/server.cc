#include "http/server.h"

#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "http/connection.h"

namespace shoal {

namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

using Acceptor = boost::asio::basic_socket_acceptor<tcp, boost::asio::io_context::executor_type>;
using ReusePort = boost::asio::detail::socket_option::boolean<SOL_SOCKET, SO_REUSEPORT>;

bool out_of_descriptors(const error_code& error) {
  const int code = error.category() == boost::system::system_category() ? error.value() : 0;
  return code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM;
}

void check(const error_code& error) {
  if (error) {
    throw std::system_error(error);
  }
}

}  // namespace

// The listening socket, and the I/O thread.
class HttpServer::Running {
 public:
  Running(HttpOptions options, std::shared_ptr<ByteBudget> budget)
      : shared(std::move(options), std::move(budget)), acceptor_(shared.io), pause_(shared.io) {
    listen();
    accept();
    thread_ = std::make_unique<Thread>([this] { shared.io.run(); });
  }

  bool is_of_this_process() const noexcept { return thread_->is_of_this_process(); }
  std::uint16_t port() const noexcept { return port_; }

  // After it the I/O thread has ended.
  void stop(std::chrono::steady_clock::time_point end) {
    boost::asio::post(shared.io, [this, end] {
      if (!shared.connections.stopping()) {
        accept_what_waits();
        error_code ignored;
        static_cast<void>(acceptor_.close(ignored));
        pause_.cancel();
      }
      shared.connections.stop(end);
    });
    const MutexLock lock(joined_);
    thread_->join();
    shared.queue.close();
  }

  HttpShared shared;

 private:
  void listen() {
    const HttpOptions& options = shared.options;
    const bool is_v6 = options.host.find(':') != std::string::npos;
    error_code error;
    tcp::resolver resolver(shared.io);
    const auto found =
        resolver.resolve(is_v6 ? tcp::v6() : tcp::v4(), options.host, std::to_string(options.port),
                         tcp::resolver::passive | tcp::resolver::numeric_service, error);
    check(error);
    const tcp::endpoint endpoint = found.begin()->endpoint();
    check(acceptor_.open(endpoint.protocol(), error));
    check(acceptor_.set_option(Acceptor::reuse_address(true), error));
    if (options.reuse_port) {
      check(acceptor_.set_option(ReusePort(true), error));
    }
    check(acceptor_.bind(endpoint, error));
    check(acceptor_.listen(options.backlog, error));
    check(acceptor_.non_blocking(true, error));
    port_ = acceptor_.local_endpoint(error).port();
    check(error);
  }

  void accept() {
    acceptor_.async_accept([this](const error_code& error, Connection::Socket socket) {
      if (!acceptor_.is_open()) {
        return;
      }
      if (out_of_descriptors(error)) {
        shared.counters.no_descriptor(error.value());
        pause_.expires_after(kDescriptorPause);
        pause_.async_wait([this](const error_code& cancelled) {
          if (!cancelled) {
            accept();
          }
        });
        return;
      }
      if (!error) {
        admit(std::move(socket));
      }
      accept();
    });
  }

  // What connected before the socket is closed may have sent its request.
  void accept_what_waits() {
    for (;;) {
      error_code error;
      Connection::Socket socket = acceptor_.accept(error);
      if (error) {
        return;
      }
      admit(std::move(socket));
    }
  }

  void admit(Connection::Socket socket) {
    try {
      error_code ignored;
      static_cast<void>(socket.set_option(tcp::no_delay(true), ignored));
      static_cast<void>(socket.non_blocking(true, ignored));
      Connections& connections = shared.connections;
      const auto one = std::make_shared<Connection>(shared, std::move(socket));
      if (connections.counted() >= shared.options.connections) {
        const auto oldest = connections.replaceable();
        if (oldest == nullptr) {
          connections.add(one, Connections::kAnswered);
          one->turn_away();
          return;
        }
        oldest->make_room();
      }
      connections.add(one, Connections::kSilent);
      one->start();
    } catch (const std::bad_alloc&) {  // the socket is closed
    }
  }

  Acceptor acceptor_;
  Connections::Timer pause_;
  std::uint16_t port_ = 0;
  Mutex joined_;
  std::unique_ptr<Thread> thread_;
};

HttpServer::HttpServer(HttpOptions options, std::shared_ptr<ByteBudget> budget) {
  SHOAL_CHECK(options.connections > 0, "connections is 0: pass 1 or more");
  SHOAL_CHECK(options.request_time.count() > 0, "the request time is 0: pass a time above 0");
  SHOAL_CHECK(budget != nullptr, "no budget: pass a ByteBudget");
  running_ = std::make_unique<Running>(std::move(options), std::move(budget));
}

HttpServer::~HttpServer() {
  if (!running_->is_of_this_process()) {
    static_cast<void>(running_.release());  // its threads and locks are the parent's
    return;
  }
  stop(std::chrono::steady_clock::now());
}

std::uint16_t HttpServer::port() const noexcept { return running_->port(); }
const HttpCounters& HttpServer::counters() const noexcept { return running_->shared.counters; }
std::size_t HttpServer::waiting() const { return running_->shared.queue.waiting(); }

void HttpServer::set_fast(std::shared_ptr<FastHandler> handler) {
  HttpShared& shared = running_->shared;
  const MutexLock lock(shared.mutex);
  if (shared.pool == nullptr && handler != nullptr) {
    shared.pool = std::make_unique<FastPool>(shared.options.threads < 1 ? 1 : shared.options.threads);
  }
  shared.fast.swap(handler);
}

std::optional<CallQueue::Taken> HttpServer::take(HttpLane lane, std::chrono::steady_clock::time_point end) {
  return running_->shared.queue.take(lane, end);
}

std::shared_ptr<HttpCall> HttpServer::taken_back(std::uint64_t id) {
  return running_->shared.queue.taken_back(id);
}

void HttpServer::stop(std::chrono::steady_clock::time_point end) { running_->stop(end); }
bool HttpServer::stopped() const { return running_->shared.queue.closed(); }

}  // namespace shoal
