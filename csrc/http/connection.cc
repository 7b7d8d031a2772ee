#include "http/connection.h"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/status.hpp>
#include <boost/beast/http/verb.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

namespace shoal {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

namespace {

constexpr std::size_t kHeadRead = 4U << 10U;   // bytes to read at a time
constexpr std::size_t kBodyRead = 64U << 10U;  // of a body
constexpr std::size_t kKept = 16U << 10U;      // bytes of a buffer that are kept for the next request
constexpr std::size_t kChunkHead = 16U << 10U;
constexpr std::uint64_t kReserved = 256U
                                    << 10U;  // bytes of a body for which memory is taken before they are here
constexpr std::size_t kJoined = 16U << 10U;  // bytes of a body that are copied behind the head
constexpr std::size_t kShown = 20;           // characters of a number that are repeated

template <class Text>
std::string_view view(const Text& text) {
  return {text.data(), text.size()};
}

void shrink(std::string& text) {
  text.clear();
  if (text.capacity() > kKept) {
    text.shrink_to_fit();
  }
}

// As a string of JSON; bytes above 127 are taken for UTF-8.
void append_json(std::string& to, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  to += '"';
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20U) {
      to.append("\\u00").append(1, kHex[code >> 4U]).append(1, kHex[code & 15U]);
    } else {
      if (c == '"' || c == '\\') {
        to += '\\';
      }
      to += c;
    }
  }
  to += '"';
}

void answer_error(HttpAnswer& answer, int status, std::string_view text) {
  answer.clear();
  answer.status = status;
  answer.content_type = "application/json";
  answer.body = "{\"error\":";
  append_json(answer.body, text);
  answer.body += '}';
  if (status == 503) {
    answer.add_header("retry-after", "1");
  }
}

bool is_prediction_of(const HttpShared& shared, http::verb method, std::string_view target) {
  const std::string_view path = target.substr(0, target.find('?'));
  return method == http::verb::post && std::ranges::any_of(shared.options.predictions, [&](const auto& end) {
           return path.ends_with(end);
         });
}

}  // namespace

std::string_view HttpShared::date(std::time_t now) {
  if (now != dated) {
    std::tm parts{};
    gmtime_r(&now, &parts);
    std::array<char, 40> text{};
    const std::size_t size = std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &parts);
    date_text.assign(text.data(), size);
    dated = now;
  }
  return date_text;
}

// ---- the body ----

void HeldBody::value_type::clear() noexcept {
  if (held != 0) {
    budget->give_back(held);
    held = 0;
  }
}

void HeldBody::reader::init(const boost::optional<std::uint64_t>& length, error_code& error) {
  error = {};
  if (length) {
    body_.bytes.reserve(static_cast<std::size_t>(std::min(*length, kReserved)));
  }
}

std::size_t HeldBody::reader::put(asio::const_buffer bytes, error_code& error) {
  if (!body_.budget->add(bytes.size())) {
    body_.refused = bytes.size();
    error = make_error_code(boost::system::errc::not_enough_memory);
    return 0;
  }
  body_.held += bytes.size();
  body_.bytes.append(static_cast<const char*>(bytes.data()), bytes.size());
  error = {};
  return bytes.size();
}

// ---- the exchange ----

Exchange::Exchange(HttpShared& shared, std::weak_ptr<Connection> connection)
    : shared_(shared), connection_(std::move(connection)) {
  reset();
}

void Exchange::reset() {
  std::string kept;
  if (parser_) {
    kept = std::move(parser_->get().body().bytes);
    shrink(kept);
  }
  parser_.emplace();
  parser_->eager(true);
  parser_->header_limit(HttpServer::kHead);
  parser_->body_limit(std::min(shared_.options.body_bytes, shared_.budget->limit()));
  parser_->get().body().bytes = std::move(kept);
  parser_->get().body().budget = shared_.budget.get();
  request = {};
  shrink(answer.body);
  answer.clear();
}

void Exchange::describe() {
  const auto& message = parser_->get();
  headers_.clear();
  for (const auto& field : message) {
    headers_.push_back({view(field.name_string()), view(field.value())});
  }
  request.method = view(message.method_string());
  request.target = view(message.target());
  request.headers = headers_;
  request.body = message.body().bytes;
}

bool Exchange::is_prediction() const {
  const auto& message = parser_->get();
  return is_prediction_of(shared_, message.method(), view(message.target()));
}

HttpLane Exchange::lane() const {
  const auto method = parser_->get().method();
  if (method == http::verb::get || method == http::verb::head) {
    return HttpLane::kRead;
  }
  return is_prediction() ? HttpLane::kPrediction : HttpLane::kChange;
}

void Exchange::drop_body() {
  request.body = {};
  shrink(parser_->get().body().bytes);
}

void Exchange::finish() {
  asio::post(shared_.io, [self = shared_from_this()] {
    if (const auto connection = self->connection_.lock()) {
      connection->answered(*self);
    }
  });
}

bool Exchange::ask(FastHandler& handler) noexcept {
  try {
    return handler.answer(request, answer);
  } catch (const std::exception& error) {
    answer_error(answer, 500, error.what());
    return true;
  }
}

bool Exchange::enqueue() {
  answer.clear();
  if (shared_.queue.add(lane(), shared_from_this())) {
    return true;
  }
  answer_error(answer, 503,
               std::to_string(shared_.options.waiting) + " requests wait to be answered: try again");
  return false;
}

// ---- the connection ----

Connection::Connection(HttpShared& shared, Socket socket) : shared_(shared), socket_(std::move(socket)) {}

// Without memory this connection ends, and no other.
template <class Work>
void Connection::guarded(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    abort();
  }
}

void Connection::start() {
  exchange_ = std::make_shared<Exchange>(shared_, weak_from_this());
  read();
}

void Connection::read() {
  reading_ = true;
  const bool in_body = exchange_ != nullptr && exchange_->parser().is_header_done();
  socket_.async_read_some(buffer_.prepare(in_body ? kBodyRead : kHeadRead),
                          [self = shared_from_this()](const error_code& error, std::size_t bytes) {
                            self->reading_ = false;
                            self->guarded([&] { self->on_read(error, bytes); });
                          });
}

void Connection::on_read(const error_code& error, std::size_t bytes) {
  if (!open_) {
    return;
  }
  if (error) {
    if (is(Connections::kArriving) && exchange_->is_prediction()) {
      shared_.counters.request(499);
    }
    close();
    return;
  }
  if (is(Connections::kLingering)) {
    read();
    return;
  }
  buffer_.commit(bytes);
  if (is(Connections::kSilent)) {
    enter(Connections::kArriving, fresh_ ? place_.since : Clock::now());
    fresh_ = false;
  }
  serve();
}

// Answers what has arrived, request after request.
void Connection::serve() {
  while (is(Connections::kArriving) && parse()) {
    dispatch();
  }
}

// False if the request is not complete: it is read on, or was refused.
bool Connection::parse() {
  Exchange::Parser& parser = exchange_->parser();
  if (buffer_.size() != 0) {
    error_code error;
    buffer_.consume(parser.put(buffer_.data(), error));
    if (error == http::error::need_more) {
      error = {};
      if (parser.is_header_done() && buffer_.size() > kChunkHead) {
        error = http::error::bad_chunk;
      }
    }
    if (error) {
      refuse_for(error);
      return false;
    }
    if (parser.is_done()) {
      return true;
    }
    if (parser.is_header_done() && !continued_ && parser.get().version() >= 11 &&
        boost::beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      send_continue();
      if (!open_) {
        return false;
      }
    }
  }
  read();
  return false;
}

void Connection::send_continue() {
  continued_ = true;
  if (exchange_->parser().get().body().bytes.empty() && !write_whole("HTTP/1.1 100 Continue\r\n\r\n")) {
    abort();
  }
}

void Connection::dispatch() {
  Exchange& exchange = *exchange_;
  const auto& message = exchange.parser().get();
  if (const auto found = message.find(http::field::transfer_encoding);
      found != message.end() && !boost::beast::iequals(found->value(), "chunked")) {
    refuse(400, "the body has a transfer encoding other than chunked", Closed::kBad);
    return;
  }
  exchange.describe();
  received_ = Clock::now();
  continued_ = false;
  keeps_ = exchange.parser().keep_alive();
  enter(Connections::kAnswered, received_);
  if (auto fast = shared_.fast_handler()) {
    if (exchange.request.body.size() > HttpServer::kSmall) {
      shared_.pool->add([fast = std::move(fast), kept = exchange_] {
        if (kept->ask(*fast) || !kept->enqueue()) {
          kept->finish();
        }
      });
      return;
    }
    if (exchange.ask(*fast)) {
      write();
      return;
    }
  }
  if (!exchange.enqueue()) {
    write();
  }
}

void Connection::answered(const Exchange& exchange) {
  if (&exchange != exchange_.get() || !is(Connections::kAnswered)) {
    return;
  }
  guarded([this] {
    write();
    serve();
  });
}

void Connection::write() {
  const HttpAnswer& answer = exchange_->answer;
  const auto& message = exchange_->parser().get();
  if (exchange_->is_prediction()) {
    shared_.counters.request(answer.status);
    shared_.counters.seconds(static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - received_).count()));
  }
  keeps_ = keeps_ && !shared_.connections.stopping();
  write_head(answer, !keeps_                  ? "connection: close\r\n"
                     : message.version() < 11 ? "connection: keep-alive\r\n"
                                              : "");
  rest_ = message.method() == http::verb::head ? std::string_view() : std::string_view(answer.body);
  if (rest_.size() <= kJoined) {
    out_.append(rest_);
    rest_ = {};
  }
  written_ = 0;
  flush();
}

void Connection::write_head(const HttpAnswer& answer, std::string_view more) {
  out_.clear();
  out_.append("HTTP/1.1 ").append(std::to_string(answer.status)).append(1, ' ');
  out_.append(view(http::obsolete_reason(static_cast<http::status>(answer.status))));
  if (!answer.content_type.empty()) {
    out_.append("\r\ncontent-type: ").append(answer.content_type);
  }
  out_.append("\r\ncontent-length: ").append(std::to_string(answer.body.size()));
  out_.append("\r\ndate: ").append(shared_.date(std::time(nullptr))).append("\r\n");
  out_.append(answer.headers).append(more).append("\r\n");
}

void Connection::flush() {
  const std::size_t before = written_;
  const std::size_t size = out_.size() + rest_.size();
  while (written_ < size) {
    const std::string_view head = std::string_view(out_).substr(std::min(written_, out_.size()));
    const std::string_view rest = rest_.substr(written_ > out_.size() ? written_ - out_.size() : 0);
    const std::array<asio::const_buffer, 2> parts{asio::buffer(head), asio::buffer(rest)};
    error_code error;
    written_ += socket_.write_some(parts, error);
    if (error == asio::error::would_block || error == asio::error::try_again) {
      if (written_ != before || !is(Connections::kStalled)) {
        enter(Connections::kStalled);
      }
      flush_more();
      return;
    }
    if (error) {
      close();
      return;
    }
  }
  end_answer();
}

// Goes on once the socket takes more.
void Connection::flush_more() {
  socket_.async_wait(Socket::wait_write, [self = shared_from_this()](const error_code& error) {
    if (!self->open_) {
      return;
    }
    if (error) {
      self->close();
      return;
    }
    self->guarded([&] {
      self->flush();
      self->serve();
    });
  });
}

void Connection::end_answer() {
  exchange_->reset();
  shrink(out_);
  if (buffer_.capacity() > kKept && buffer_.size() == 0) {
    buffer_.shrink_to_fit();
  }
  if (!keeps_ || shared_.connections.stopping()) {
    if (buffer_.size() == 0 && !shared_.connections.stopping()) {
      close();
    } else {
      linger();  // more requests may be here
    }
  } else if (buffer_.size() != 0) {
    enter(Connections::kArriving);
  } else {
    enter(Connections::kSilent);
    read();
  }
}

void Connection::refuse_for(const error_code& error) {
  const auto& message = exchange_->parser().get();
  if (error == http::error::header_limit || error == http::error::header_field_name_too_large ||
      error == http::error::header_field_value_too_large) {
    refuse(431, "more than " + std::to_string(HttpServer::kHead) + " bytes of headers", Closed::kHead);
  } else if (error == http::error::body_limit) {
    const std::string most = std::to_string(std::min(shared_.options.body_bytes, shared_.budget->limit()));
    const auto length = view(message[http::field::content_length]).substr(0, kShown);
    const std::string size = length.empty() ? "more than " + most : std::string(length);
    refuse(413, "a body of " + size + " bytes: at most " + most + " are accepted");
  } else if (error == boost::system::errc::not_enough_memory) {
    refuse_busy(message.body().refused);
  } else {
    refuse(400, "not a request of HTTP/1.1: " + error.message(), Closed::kBad);
  }
}

void Connection::refuse_busy(std::uint64_t bytes) {
  const ByteBudget& budget = *shared_.budget;
  refuse(503, "the requests in progress use " + std::to_string(budget.held()) +
                  " bytes, and this one needs " + std::to_string(bytes) + " more: at most " +
                  std::to_string(budget.limit()) + " are used at a time; try again later");
}

// Answers what has not arrived completely, and closes.
void Connection::refuse(int status, std::string_view text, std::optional<Closed> reason) {
  if (reason) {
    shared_.counters.closed(*reason);
  }
  if (exchange_ != nullptr && exchange_->is_prediction()) {
    shared_.counters.request(status);
  }
  HttpAnswer answer;
  answer_error(answer, status, text);
  write_head(answer, "connection: close\r\n");
  out_.append(answer.body);
  exchange_.reset();
  if (write_whole(out_)) {
    linger();
  } else {
    abort();
  }
}

// Of a text that is so short that the socket takes it, unless the client reads nothing.
bool Connection::write_whole(std::string_view text) {
  error_code error;
  return socket_.write_some(asio::buffer(text), error) == text.size() && !error;
}

void Connection::linger() {
  error_code error;
  static_cast<void>(socket_.shutdown(Socket::shutdown_send, error));
  buffer_.clear();
  exchange_.reset();
  if (error || shared_.connections.lingering() >= HttpServer::kMostLingering) {
    close();
    return;
  }
  enter(Connections::kLingering);
  if (!reading_) {
    read();
  }
}

void Connection::turn_away() {
  refuse(503, std::to_string(shared_.options.connections) + " requests are being answered: try again",
         Closed::kFull);
}

void Connection::make_room() {
  shared_.counters.closed(Closed::kFull);
  if (is(Connections::kStalled)) {
    abort();
  } else {
    close();
  }
}

void Connection::stop() {
  error_code error;
  if (socket_.available(error) == 0 || error) {
    close();
  }
}

void Connection::expired() {
  switch (place_.state) {
    case Connections::kSilent:
      shared_.counters.closed(Closed::kSilent);
      close();
      break;
    case Connections::kArriving: {
      const double seconds = std::chrono::duration<double>(shared_.options.request_time).count();
      std::array<char, 32> text{};
      const int size = std::snprintf(text.data(), text.size(), "%g", seconds);
      refuse(408,
             "the request did not arrive within " + std::string(text.data(), static_cast<std::size_t>(size)) +
                 " seconds",
             Closed::kSlow);
      break;
    }
    case Connections::kStalled:
      shared_.counters.closed(Closed::kStalled);
      abort();
      break;
    default:
      close();
  }
}

// Without what the client has not taken.
void Connection::abort() {
  error_code error;
  static_cast<void>(socket_.set_option(asio::socket_base::linger(true, 0), error));
  close();
}

void Connection::close() {
  if (!open_) {
    return;
  }
  open_ = false;
  const auto self = shared_from_this();  // its place holds it
  shared_.connections.remove(*this);
  error_code error;
  static_cast<void>(socket_.close(error));
  exchange_.reset();
}

}  // namespace shoal
