// Connection: one client's connection; Exchange: its request and the answer to it.
//
// The parser of Boost.Beast reads what has arrived, so requests may be cut anywhere and may follow each other
// without a wait. Nothing is read while a request is answered. An answer is written at once as far as the
// socket takes it.
//
//   read() -> serve() -> parse() -> dispatch() -> [FastHandler, or a thread that takes it] -> write()
//      ^--------------------------------------------------------------------------------------- answered
//
// A refusal is written, and then what arrives is dropped until the client has closed (or for kLingering):
// closed at once, with bytes unread, the connection would be reset, and the client would not see why.
//
// Threads: the I/O thread; an exchange that is answered elsewhere belongs to the thread that has it.

#pragma once

#include <boost/asio/basic_stream_socket.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/optional/optional.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "http/byte_budget.h"
#include "http/call_queue.h"
#include "http/connections.h"
#include "http/counters.h"
#include "http/fast_pool.h"
#include "http/message.h"
#include "http/server.h"

namespace shoal {

// What the connections of a server share.
struct HttpShared {
  HttpShared(HttpOptions given, std::shared_ptr<ByteBudget> bytes)
      : options(std::move(given)),
        budget(std::move(bytes)),
        queue(options.waiting),
        connections(io, options.request_time) {}

  std::shared_ptr<FastHandler> fast_handler() {
    const MutexLock lock(mutex);
    return fast;
  }
  // Of a second, as HTTP writes it. By the I/O thread.
  std::string_view date(std::time_t now);

  const HttpOptions options;
  const std::shared_ptr<ByteBudget> budget;
  HttpCounters counters;
  boost::asio::io_context io{1};
  CallQueue queue;
  Connections connections;
  Mutex mutex;
  std::shared_ptr<FastHandler> fast GUARDED_BY(mutex);
  std::unique_ptr<FastPool> pool;  // from the first handler on
  std::time_t dated = -1;
  std::string date_text;
};

// A body whose bytes are in the budget.
struct HeldBody {
  struct value_type {
    value_type() = default;
    value_type(const value_type&) = delete;
    value_type(value_type&&) = delete;
    value_type& operator=(const value_type&) = delete;
    value_type& operator=(value_type&&) = delete;
    ~value_type() { clear(); }
    void clear() noexcept;

    std::string bytes;
    ByteBudget* budget = nullptr;
    std::uint64_t held = 0;
    std::uint64_t refused = 0;  // bytes that did not fit
  };

  class reader {
   public:
    template <bool is_request, class Fields>
    reader(boost::beast::http::header<is_request, Fields>& /*header*/, value_type& body) : body_(body) {}
    void init(const boost::optional<std::uint64_t>& length, boost::system::error_code& error);
    std::size_t put(boost::asio::const_buffer bytes, boost::system::error_code& error);
    void finish(boost::system::error_code& error) { error = {}; }

   private:
    value_type& body_;
  };
};

class Exchange final : public HttpCall, public std::enable_shared_from_this<Exchange> {
 public:
  using Parser = boost::beast::http::request_parser<HeldBody>;

  Exchange(HttpShared& shared, std::weak_ptr<Connection> connection);

  void drop_body() override;
  void finish() override;

  // Begins with the next request; the memory of a small one is kept.
  void reset();
  Parser& parser() noexcept { return *parser_; }
  // Describes the request, whose parser is done.
  void describe();
  bool is_prediction() const;
  HttpLane lane() const;
  // Has the handler answer, without exceptions; false: it does not.
  bool ask(FastHandler& handler) noexcept;
  // Queues the request, or answers that the queue is full and returns false.
  bool enqueue();

 private:
  HttpShared& shared_;
  const std::weak_ptr<Connection> connection_;
  std::optional<Parser> parser_;
  std::vector<HttpHeader> headers_;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket =
      boost::asio::basic_stream_socket<boost::asio::ip::tcp, boost::asio::io_context::executor_type>;
  using Clock = std::chrono::steady_clock;

  Connection(HttpShared& shared, Socket socket);

  Connections::Place& place() noexcept { return place_; }

  void start();
  // Says that there is no room for this connection.
  void turn_away();
  // Closes it to make room for another one.
  void make_room();
  // Closes it, unless a request has begun to arrive.
  void stop();
  // The time of its state is over.
  void expired();
  // The exchange has its answer.
  void answered(const Exchange& exchange);
  void abort();

 private:
  using State = Connections::State;

  void read();
  void on_read(const boost::system::error_code& error, std::size_t bytes);
  void serve();
  bool parse();
  void dispatch();
  template <class Work>
  void guarded(const Work& work);
  void write();
  void write_head(const HttpAnswer& answer, std::string_view more);
  void flush();
  void flush_more();
  void end_answer();
  void refuse(int status, std::string_view text, std::optional<Closed> reason = std::nullopt);
  void refuse_for(const boost::system::error_code& error);
  void refuse_busy(std::uint64_t bytes);
  void send_continue();
  bool write_whole(std::string_view text);
  void linger();
  void close();
  void enter(State state) { enter(state, Clock::now()); }
  void enter(State state, Clock::time_point since) { shared_.connections.move(*this, state, since); }
  bool is(State state) const noexcept { return open_ && place_.state == state; }

  HttpShared& shared_;
  Socket socket_;
  Connections::Place place_;
  boost::beast::flat_buffer buffer_;
  std::shared_ptr<Exchange> exchange_;
  std::string out_;             // the head of the answer, and a small body
  std::string_view rest_;       // what of the body is not in out_
  std::size_t written_ = 0;     // bytes of both
  Clock::time_point received_;  // when the request was complete
  bool open_ = true;
  bool reading_ = false;
  bool fresh_ = true;       // no request has begun yet
  bool continued_ = false;  // 100 Continue was sent
  bool keeps_ = true;       // the connection is kept after this answer
};

}  // namespace shoal
