// HttpRequest and HttpAnswer: what is asked and answered, without sockets.
//
// A request is views into memory of the server, valid until its answer is finished. An answer is written into
// strings that the server keeps for the next request of the connection.
//
//   FastHandler   answers requests without Python; what it passes on is answered by who takes it from the
//                 server (http/server.h)
//   HttpCall      a request on its way through other threads than the server's own
//
// Threads: a FastHandler is called by several threads at a time. A call belongs to one thread at a time.

#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"

namespace shoal {

// Whether two names of headers are the same: ASCII letters of either case are.
inline bool same_name(std::string_view a, std::string_view b) noexcept {
  const auto lower = [](char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

struct HttpHeader {
  std::string_view name;
  std::string_view value;
};

struct HttpRequest {
  std::string_view method;
  std::string_view target;  // as it was sent: with its query, and not decoded
  std::span<const HttpHeader> headers;
  std::string_view body;

  // The first header of this name; empty if there is none.
  std::string_view header(std::string_view name) const noexcept {
    const auto found =
        std::ranges::find_if(headers, [&](const auto& one) { return same_name(one.name, name); });
    return found == headers.end() ? std::string_view() : found->value;
  }
};

struct HttpAnswer {
  int status = 200;
  std::string content_type;
  std::string headers;  // further ones, as lines; see add_header()
  std::string body;

  void add_header(std::string_view name, std::string_view value) {
    SHOAL_CHECK(name.find_first_of("\r\n:") == name.npos && value.find_first_of("\r\n") == value.npos,
                "a header of an answer has a line end in it");
    headers.append(name).append(": ").append(value).append("\r\n");
  }

  void clear() noexcept {
    status = 200;
    content_type.clear();
    headers.clear();
    body.clear();
  }
};

class FastHandler {
 public:
  FastHandler() = default;
  virtual ~FastHandler() = default;
  FastHandler(const FastHandler&) = delete;
  FastHandler& operator=(const FastHandler&) = delete;

  // Writes the answer, which is empty before. False: the request is for others to answer. An exception is
  // answered with status 500 and its text.
  virtual bool answer(const HttpRequest& request, HttpAnswer& answer) = 0;
};

class HttpCall {
 public:
  HttpCall() = default;
  virtual ~HttpCall() = default;
  HttpCall(const HttpCall&) = delete;
  HttpCall& operator=(const HttpCall&) = delete;

  // The body was copied: it need not be kept until the answer.
  virtual void drop_body() = 0;
  // Sends the answer; the last call of a thread that has this.
  virtual void finish() = 0;

  HttpRequest request;
  HttpAnswer answer;
};

}  // namespace shoal
