// Requests at a fixed rate, whatever their answers take: the latency of each counts from the moment at which it
// was due. Waiting spins, on a core of its own, so that no timer of the kernel adds to what is measured.
//
//   paced_requests PORT RATE SECONDS CONNECTIONS BODY
//
// Posts the file BODY, JSON, to /predict; one request of a connection at a time, a request that finds none free
// waits for one. Prints: requests, microseconds from the first to the last answer, p50, p99 and the longest
// latency in microseconds, answers other than 200.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

class Connection {
 public:
  explicit Connection(std::uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0 && errno != EINPROGRESS) {
      throw std::runtime_error("no connection to port " + std::to_string(port));
    }
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { ::close(socket_); }

  bool is_free() const noexcept { return !waits_; }
  Clock::time_point due() const noexcept { return due_; }

  void begin(const std::string& request, Clock::time_point due) {
    left_ = request.size();
    due_ = due;
    answer_.clear();
    waits_ = true;
  }

  // Whether the answer is complete.
  bool advance(const std::string& request) {
    while (left_ > 0) {
      const ssize_t sent = ::send(socket_, request.data() + (request.size() - left_), left_, MSG_NOSIGNAL);
      if (sent < 0) {
        check_again();
        return false;
      }
      left_ -= static_cast<std::size_t>(sent);
    }
    char some[4096];
    const ssize_t got = ::recv(socket_, some, sizeof some, 0);
    if (got == 0) {
      throw std::runtime_error("the server has closed a connection, after: " + answer_);
    }
    if (got < 0) {
      check_again();
      return false;
    }
    answer_.append(some, static_cast<std::size_t>(got));
    const std::size_t head = answer_.find("\r\n\r\n");
    const std::size_t length = answer_.find("\ncontent-length: ");
    if (head == std::string::npos || length > head) {
      return false;
    }
    waits_ = answer_.size() < head + 4 + std::strtoull(answer_.c_str() + length + 17, nullptr, 10);
    return !waits_;
  }

  bool has_failed() const noexcept { return !answer_.starts_with("HTTP/1.1 200"); }

 private:
  static void check_again() {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOTCONN && errno != EINTR) {
      throw std::runtime_error("a connection was lost");
    }
  }

  int socket_;
  std::size_t left_ = 0;  // of the request
  bool waits_ = false;
  Clock::time_point due_;
  std::string answer_;
};

int run(char** words) {
  const auto port = static_cast<std::uint16_t>(std::strtoul(words[1], nullptr, 10));
  const double rate = std::strtod(words[2], nullptr);
  const auto total = static_cast<std::size_t>(rate * std::strtod(words[3], nullptr));
  std::ifstream file(words[5], std::ios::binary);
  const std::string body{std::istreambuf_iterator<char>(file), {}};
  const std::string request =
      "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  std::vector<std::unique_ptr<Connection>> connections;
  for (std::size_t i = 0; i < std::strtoull(words[4], nullptr, 10); ++i) {
    connections.push_back(std::make_unique<Connection>(port));
  }
  std::vector<double> latencies;
  std::size_t begun = 0;
  std::size_t failed = 0;
  const auto begin = Clock::now() + std::chrono::milliseconds(50);
  const auto last = begin + std::chrono::seconds(30) +
                    std::chrono::duration_cast<Clock::duration>(
                        std::chrono::duration<double>(static_cast<double>(total) / rate));
  auto now = begin;
  while (latencies.size() < total) {
    for (const auto& one : connections) {
      now = Clock::now();
      if (!one->is_free() && one->advance(request)) {
        const std::chrono::duration<double, std::micro> latency = Clock::now() - one->due();
        latencies.push_back(latency.count());
        failed += one->has_failed() ? 1U : 0U;
      }
      const auto due = begin + std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(static_cast<double>(begun) / rate));
      if (one->is_free() && begun < total && now >= due) {
        one->begin(request, due);
        ++begun;
      }
    }
    if (now > last) {
      throw std::runtime_error("the answers have not come within 30 s");
    }
  }
  const std::chrono::duration<double, std::micro> spent = Clock::now() - begin;
  std::sort(latencies.begin(), latencies.end());
  const auto at = [&](double part) {
    return latencies[static_cast<std::size_t>(part * static_cast<double>(total - 1))];
  };
  std::printf("%zu %.0f %.1f %.1f %.1f %zu\n", total, spent.count(), at(0.5), at(0.99), at(1.0), failed);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 6) {
    std::fprintf(stderr, "usage: %s PORT RATE SECONDS CONNECTIONS BODY\n", words[0]);
    return 2;
  }
  try {
    return run(words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
