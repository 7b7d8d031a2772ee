// HttpServer over real sockets; tests/serve has it with models behind it.

#include "http/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

namespace shoal::http_test {
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

// A client that waits for at most a minute.
class Client {
 public:
  explicit Client(std::uint16_t port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    CHECK(socket_ >= 0);
    const timeval limit{60, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (receive_buffer != 0) {
      ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // False once the server has closed.
  bool send(std::string_view text) const {
    while (!text.empty()) {
      const auto sent = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      text.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  void end() const { ::shutdown(socket_, SHUT_WR); }

  // One answer: its head, and as many bytes as it names.
  std::string answer(bool has_body = true) {
    std::size_t head = std::string::npos;
    while ((head = read_.find("\r\n\r\n")) == std::string::npos) {
      if (!more()) {
        return std::exchange(read_, "");
      }
    }
    head += 4;
    std::size_t size = 0;
    if (const auto at = read_.find("content-length: "); has_body && at < head) {
      size = std::stoul(read_.substr(at + 16));
    }
    while (read_.size() < head + size) {
      CHECK(more());
    }
    std::string one = read_.substr(0, head + size);
    read_.erase(0, head + size);
    return one;
  }
  // What the server says until it closes.
  std::string rest() {
    while (more()) {
    }
    return std::exchange(read_, "");
  }
  std::string ask(std::string_view text) {
    CHECK(send(text));
    return answer();
  }

 private:
  bool more() {
    char bytes[4096];
    const auto got = ::recv(socket_, bytes, sizeof(bytes), 0);
    CHECK(got >= 0 || errno == ECONNRESET);
    if (got > 0) {
      read_.append(bytes, static_cast<std::size_t>(got));
    }
    return got > 0;
  }

  const int socket_;
  std::string read_;
};

std::string get(std::string_view target) {
  return "GET " + std::string(target) + " HTTP/1.1\r\nhost: x\r\n\r\n";
}

std::string post(std::string_view body, std::string_view target = "/predict", std::string_view more = "") {
  return "POST " + std::string(target) + " HTTP/1.1\r\nHost: x\r\n" + std::string(more) +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + std::string(body);
}

std::string body_of(const std::string& answer) { return answer.substr(answer.find("\r\n\r\n") + 4); }
int status_of(const std::string& answer) {
  CHECK(answer.starts_with("HTTP/1.1 "));
  return std::stoi(answer.substr(9, 3));
}

HttpOptions with_predictions(HttpOptions options) {
  options.predictions = {"/predict"};
  return options;
}

// A server whose requests threads take and answer with what they are.
struct World {
  explicit World(HttpOptions options = {}, std::uint64_t in_flight = 1U << 20U)
      : budget(std::make_shared<ByteBudget>(in_flight)),
        server(with_predictions(std::move(options)), budget) {
    for (const auto lane :
         {HttpLane::kPrediction, HttpLane::kPrediction, HttpLane::kRead, HttpLane::kChange}) {
      threads.emplace_back([this, lane] { work(lane); });
    }
  }
  ~World() {
    go_on();
    server.stop(Clock::now());
    for (auto& thread : threads) {
      thread.join();
    }
  }

  void work(HttpLane lane) {
    while (!server.stopped()) {
      const auto taken = server.take(lane, Clock::now() + 1s);
      if (!taken) {
        continue;
      }
      {
        std::unique_lock lock(mutex);
        ++began;
        changed.notify_all();
        changed.wait(lock, [this] { return !held; });
      }
      const auto call = server.taken_back(taken->id);
      CHECK(call == taken->call);
      CHECK(server.taken_back(taken->id) == nullptr);
      const HttpRequest& request = call->request;
      call->answer.content_type = "text/plain";
      call->answer.add_header("x-host", request.header("HOST"));
      if (request.target == "/large") {
        call->answer.body.assign(std::size_t{8} << 20U, 'x');
      } else {
        call->answer.body =
            std::string(request.method) + " " + std::string(request.target) + " " + std::string(request.body);
      }
      call->drop_body();
      call->finish();
    }
  }
  void hold() {
    const std::lock_guard lock(mutex);
    held = true;
  }
  void go_on() {
    const std::lock_guard lock(mutex);
    held = false;
    changed.notify_all();
  }
  // Waits until so many requests are being answered.
  void wait_for(int count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return began >= count; });
  }
  std::uint64_t closed(Closed reason) const {
    return server.counters().closed_at(static_cast<std::size_t>(reason));
  }
  std::uint16_t port() const { return server.port(); }

  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;
  int began = 0;
  std::shared_ptr<ByteBudget> budget;
  HttpServer server;
  std::vector<std::thread> threads;
};

void eventually(auto condition) {
  const auto end = Clock::now() + 60s;
  while (!condition()) {
    CHECK(Clock::now() < end);
    std::this_thread::sleep_for(1ms);
  }
}

// Answers predictions whose body begins with a given letter.
class Double final : public FastHandler {
 public:
  explicit Double(std::string name) : name_(std::move(name)) {}
  bool answer(const HttpRequest& request, HttpAnswer& answer) override {
    if (request.target != "/predict" || !request.body.starts_with('f')) {
      answer.body = "not to be seen";
      return false;
    }
    if (request.body == "fail") {
      throw std::runtime_error("it \"failed\"\n");
    }
    CHECK_EQ(request.header("host"), std::string_view("x"));
    answer.content_type = "application/json";
    answer.add_header("x-handler", name_);
    answer.body = name_ + std::to_string(request.body.size());
    return true;
  }

 private:
  const std::string name_;
};

}  // namespace

TEST(a_request_is_answered_wherever_it_is_cut) {
  World world;
  Client client(world.port());
  const std::string request = post("some bytes", "/predict?a=b", "x-more: 1\r\n");
  for (std::size_t at = 1; at < request.size(); ++at) {
    CHECK(client.send(request.substr(0, at)));
    if (at % 3 == 0) {
      std::this_thread::sleep_for(1ms);
    }
    const std::string answer = client.ask(request.substr(at));
    CHECK_EQ(body_of(answer), std::string("POST /predict?a=b some bytes"));
    CHECK(answer.starts_with("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 28\r\ndate: "));
    CHECK(answer.find("\r\nx-host: x\r\n") != std::string::npos);
  }
  eventually([&] { return world.budget->held() == 0; });
  CHECK_EQ(world.server.counters().requests_of(200), request.size() - 1);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i <= HttpCounters::kBounds.size(); ++i) {
    sum += world.server.counters().bucket(i);
  }
  CHECK_EQ(sum, request.size() - 1);
  CHECK(world.server.counters().total_ns() > 0);
}

TEST(requests_that_follow_each_other_without_a_wait_are_answered_in_order) {
  World world;
  world.server.set_fast(std::make_shared<Double>("h"));
  Client client(world.port());
  std::string all;
  for (int i = 0; i < 300; ++i) {
    std::string body("f");
    body.append(static_cast<std::size_t>(i), 'x');
    std::string path("/");
    path.append(std::to_string(i));
    all += i % 3 == 0 ? post(body) : (i % 3 == 1 ? get(path) : post(std::to_string(i), "/change"));
  }
  std::thread sending([&] { CHECK(client.send(all)); });
  for (int i = 0; i < 300; ++i) {
    const std::string number = std::to_string(i);
    std::string want(i % 3 == 0 ? "h" : (i % 3 == 1 ? "GET /" : "POST /change "));
    want.append(i % 3 == 0 ? std::to_string(i + 1) : number).append(i % 3 == 1 ? " " : "");
    CHECK_EQ(body_of(client.answer()), want);
  }
  sending.join();
}

TEST(chunked_bodies_are_put_together) {
  World world;
  Client client(world.port());
  const std::string head = "POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n";
  for (const auto* const body :
       {"4\r\nsome\r\n6\r\n bytes\r\n0\r\n\r\n", "A;a=b;c=\"d\"\r\nsome bytes\r\n00\r\nx-end: 1\r\n\r\n",
        "1\r\ns\r\n9\r\nome bytes\r\n0;q\r\n\r\n"}) {
    CHECK_EQ(body_of(client.ask(head + body)), std::string("POST /predict some bytes"));
    CHECK(client.send(head));
    for (const char c : std::string_view(body)) {
      CHECK(client.send(std::string_view(&c, 1)));
    }
    CHECK_EQ(body_of(client.answer()), std::string("POST /predict some bytes"));
  }
  CHECK_EQ(body_of(client.ask(head + "0\r\n\r\n")), std::string("POST /predict "));
}

TEST(connections_are_kept_as_the_version_has_it) {
  World world;
  {
    Client client(world.port());
    CHECK(client.send("GET /a HTTP/1.0\r\n\r\n"));
    const std::string said = client.rest();
    CHECK(said.find("connection: close") != std::string::npos);
  }
  {
    Client client(world.port());
    const std::string first = client.ask("GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n");
    CHECK(first.find("connection: keep-alive") != std::string::npos);
    CHECK(client.send("GET /b HTTP/1.1\r\nconnection: close\r\n\r\n"));
    CHECK(client.rest().find("connection: close") != std::string::npos);
  }
}

TEST(head_has_the_length_of_a_body_that_is_not_sent) {
  World world;
  Client client(world.port());
  CHECK(client.send("HEAD /abc HTTP/1.1\r\nhost: x\r\n\r\n" + get("/d")));
  CHECK(client.answer(false).find("content-length: 10\r\n") != std::string::npos);
  CHECK_EQ(body_of(client.answer()), std::string("GET /d "));
}

TEST(a_client_that_asks_first_is_told_whether_to_send_its_body) {
  HttpOptions options;
  options.body_bytes = 100;
  World world(options);
  {
    Client client(world.port());
    CHECK(client.send("POST /predict HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 4\r\n\r\n"));
    CHECK_EQ(client.answer(), std::string("HTTP/1.1 100 Continue\r\n\r\n"));
    CHECK_EQ(body_of(client.ask("body")), std::string("POST /predict body"));
    CHECK_EQ(status_of(client.ask(post("x", "/predict", "expect: 100-continue\r\n"))), 200);
  }
  Client client(world.port());
  CHECK(client.send("POST /predict HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 101\r\n\r\n"));
  const std::string said = client.rest();
  CHECK_EQ(status_of(said), 413);
  CHECK(said.find("a body of 101 bytes: at most 100 are accepted") != std::string::npos);
}

TEST(bodies_and_heads_that_are_too_large_are_refused_with_words) {
  HttpOptions options;
  options.body_bytes = 100'000;
  World world(options);
  const std::string chunked = "POST /predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n";
  std::string chunks;
  for (int i = 0; i < 12; ++i) {
    chunks += "2710\r\n" + std::string(10'000, 'x') + "\r\n";
  }
  const std::vector<std::pair<std::string, int>> refused{
      {post(std::string(100'001, 'x')), 413},
      {chunked + chunks, 413},
      {"POST /predict HTTP/1.1\r\ncontent-length: 99999999999999999\r\n\r\n", 413},
      {get("/" + std::string(70'000, 'x')), 431},
      {"GET / HTTP/1.1\r\nx: " + std::string(66'000, 'x') + "\r\n\r\n", 431},
      {"GET / HTTP/1.1\r\n" + std::string(300'000, 'x'), 431},
      {chunked + "0\r\nx: " + std::string(70'000, 'x') + "\r\n\r\n", 431},
      {chunked + "1;" + std::string(300'000, 'x'), 400},
  };
  for (const auto& [request, status] : refused) {
    Client client(world.port());
    client.send(request);
    const std::string said = client.rest();
    CHECK_EQ(status_of(said), status);
    CHECK(said.find("connection: close") != std::string::npos);
    CHECK(said.find("{\"error\":\"") != std::string::npos);
  }
  Client client(world.port());
  CHECK_EQ(status_of(client.ask(post(std::string(100'000, 'x')))), 200);
  CHECK_EQ(status_of(client.ask("GET / HTTP/1.1\r\nx: " + std::string(60'000, 'x') + "\r\n\r\n")), 200);
  CHECK_EQ(world.closed(Closed::kHead), 4);
  CHECK_EQ(world.server.counters().requests_of(413), 3);
  CHECK_EQ(world.budget->held(), 0);
}

TEST(what_is_not_http_is_refused_and_counted) {
  World world;
  const std::vector<std::string> bad{
      std::string("\x16\x03\x01\x02\x00\x01", 6) + "\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "GET / HTTP/9.9\r\n\r\n",
      "GET  / HTTP/1.1\r\n\r\n",
      "GET / HTTP/1.1\nhost: x\n\n",
      "GET / HTTP/1.1\r\nno colon\r\n\r\n",
      "GET / HTTP/1.1\r\nspace : x\r\n\r\n",
      std::string("GET / HTTP/1.1\r\nx: a\0b\r\n\r\n", 26),
      "POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
      "POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
      "POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
      "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n0\r\n\r\n",
      "POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
      "POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
      "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnot hex\r\n",
      "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nxx\r\n0\r\n\r\n",
  };
  for (const std::string& request : bad) {
    Client client(world.port());
    client.send(request);
    CHECK_EQ(status_of(client.rest()), 400);
  }
  CHECK_EQ(world.closed(Closed::kBad), bad.size());
  CHECK_EQ(status_of(Client(world.port()).ask(get("/"))), 200);
}

TEST(silent_and_slow_clients_are_closed_in_their_time) {
  HttpOptions options;
  options.request_time = 400ms;
  World world(options);
  const auto began = Clock::now();
  Client silent(world.port());
  Client head(world.port());
  Client body(world.port());
  Client kept(world.port());
  CHECK(head.send("GET / HT"));
  CHECK(body.send("POST /predict HTTP/1.1\r\ncontent-length: 5\r\n\r\nabc"));
  CHECK_EQ(status_of(kept.ask(get("/"))), 200);
  CHECK_EQ(silent.rest(), std::string());
  CHECK(Clock::now() - began >= 400ms);
  for (Client* const slow : {&head, &body}) {
    const std::string said = slow->rest();
    CHECK_EQ(status_of(said), 408);
    CHECK(said.find("the request did not arrive within 0.4 seconds") != std::string::npos);
  }
  CHECK_EQ(kept.rest(), std::string());
  CHECK_EQ(world.closed(Closed::kSilent), 2);
  CHECK_EQ(world.closed(Closed::kSlow), 2);
  CHECK_EQ(world.server.counters().requests_of(408), 1);
  CHECK_EQ(world.budget->held(), 0);
}

TEST(requests_may_take_longer_together_than_one_may) {
  HttpOptions options;
  options.request_time = 1s;
  World world(options);
  Client client(world.port());
  const std::string request = post("bytes");
  for (int i = 0; i < 4; ++i) {
    CHECK(client.send(request.substr(0, 10)));
    std::this_thread::sleep_for(400ms);
    CHECK_EQ(status_of(client.ask(request.substr(10))), 200);
  }
}

TEST(a_client_that_leaves_is_counted_and_its_bytes_are_given_back) {
  World world;
  for (int i = 0; i < 10; ++i) {
    Client client(world.port());
    CHECK(client.send("POST /predict HTTP/1.1\r\ncontent-length: 1000\r\n\r\nsome"));
    if (i % 2 == 0) {
      client.end();
      CHECK_EQ(client.rest(), std::string());
    }
  }
  eventually([&] { return world.server.counters().requests_of(499) == 10; });
  CHECK_EQ(world.budget->held(), 0);
  // While its request is answered.
  world.hold();
  {
    Client client(world.port());
    CHECK(client.send(post("some")));
    world.wait_for(1);
  }
  world.go_on();
  eventually([&] { return world.budget->held() == 0; });
}

TEST(a_further_connection_replaces_the_one_that_has_waited_longest) {
  HttpOptions options;
  options.connections = 4;
  World world(options);
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 3; ++i) {
    slow.push_back(std::make_unique<Client>(world.port()));
    CHECK(slow.back()->send("POST /predict HTTP/1.1\r\ncontent-length: 9\r\n\r\n" + std::to_string(i)));
    eventually([&] { return world.budget->held() == static_cast<std::uint64_t>(i + 1); });
  }
  Client idle(world.port());
  CHECK_EQ(status_of(idle.ask(get("/"))), 200);
  Client first(world.port());  // instead of the idle one
  CHECK_EQ(idle.rest(), std::string());
  CHECK_EQ(status_of(first.ask(post("x"))), 200);
  CHECK(first.send("POST"));  // no longer idle
  std::this_thread::sleep_for(50ms);
  Client second(world.port());  // instead of the first slow one
  CHECK_EQ(slow[0]->rest(), std::string());
  CHECK_EQ(status_of(second.ask(get("/"))), 200);
  CHECK_EQ(status_of(slow[1]->ask("23456789")), 200);
  CHECK_EQ(world.closed(Closed::kFull), 2);
}

TEST(a_further_connection_is_refused_while_all_are_answered) {
  HttpOptions options;
  options.connections = 3;
  World world(options);
  world.hold();
  std::vector<std::unique_ptr<Client>> busy;
  for (int i = 0; i < 3; ++i) {
    busy.push_back(std::make_unique<Client>(world.port()));
    CHECK(busy.back()->send(post("x")));
  }
  eventually([&] { return world.server.waiting() == 1; });
  for (int i = 0; i < 40; ++i) {
    const std::string said = Client(world.port()).rest();
    CHECK_EQ(status_of(said), 503);
    CHECK(said.find("3 requests are being answered: try again") != std::string::npos);
  }
  world.go_on();
  for (const auto& one : busy) {
    CHECK_EQ(status_of(one->answer()), 200);
  }
  CHECK_EQ(world.closed(Closed::kFull), 40);
}

TEST(a_client_that_takes_no_answer_is_cut_off) {
  HttpOptions options;
  options.request_time = 300ms;
  World world(options);
  Client greedy(world.port(), 4096);
  while (greedy.send(get("/large"))) {
  }
  CHECK_EQ(world.closed(Closed::kStalled), 1);
  // One that takes it slowly is not.
  Client patient(world.port());
  CHECK(patient.send(get("/large")));
  std::this_thread::sleep_for(200ms);
  CHECK_EQ(body_of(patient.answer()).size(), std::size_t{8} << 20U);
  CHECK_EQ(world.closed(Closed::kStalled), 1);
}

TEST(a_body_that_does_not_fit_beside_others_is_refused_for_now) {
  World world({}, 10'000);
  Client held(world.port());
  CHECK(held.send("POST /predict HTTP/1.1\r\ncontent-length: 9900\r\n\r\n" + std::string(9'800, 'x')));
  eventually([&] { return world.budget->held() == 9'800; });
  Client other(world.port());
  CHECK(other.send(post(std::string(300, 'x'))));
  const std::string said = other.rest();
  CHECK_EQ(status_of(said), 503);
  CHECK(said.find("retry-after: 1\r\n") != std::string::npos);
  CHECK(
      said.find(
          "the requests in progress use 9800 bytes, and this one needs 300 more: at most 10000 are used at a "
          "time; try again later") != std::string::npos);
  CHECK_EQ(status_of(held.ask(std::string(100, 'x'))), 200);
  CHECK_EQ(status_of(Client(world.port()).ask(post(std::string(10'001, 'x')))), 413);
  eventually([&] { return world.budget->held() == 0; });
}

TEST(a_full_queue_is_answered_at_once_and_the_connection_kept) {
  HttpOptions options;
  options.waiting = 2;
  World world(options);
  world.hold();
  std::vector<std::unique_ptr<Client>> busy;
  for (int i = 0; i < 4; ++i) {  // two are taken, two wait
    busy.push_back(std::make_unique<Client>(world.port()));
    CHECK(busy.back()->send(post("x")));
    world.wait_for(std::min(i + 1, 2));
  }
  eventually([&] { return world.server.waiting() == 2; });
  Client further(world.port());
  const std::string said = further.ask(post("x"));
  CHECK_EQ(status_of(said), 503);
  CHECK(said.find("2 requests wait to be answered: try again") != std::string::npos);
  CHECK(said.find("connection: close") == std::string::npos);
  CHECK(further.send(get("/")));  // of another lane
  world.go_on();
  CHECK_EQ(status_of(further.answer()), 200);
  for (const auto& one : busy) {
    CHECK_EQ(status_of(one->answer()), 200);
  }
}

TEST(a_fast_handler_answers_small_and_large_requests_and_passes_others_on) {
  HttpOptions options;
  options.threads = 2;
  World world(options);
  world.server.set_fast(std::make_shared<Double>("h"));
  Client client(world.port());
  for (const std::size_t size : {1U, 8192U, 8193U, 100'000U}) {
    const std::string answer = client.ask(post("f" + std::string(size - 1, 'x')));
    CHECK_EQ(body_of(answer), "h" + std::to_string(size));
    CHECK(answer.find("x-handler: h\r\n") != std::string::npos);
    CHECK_EQ(body_of(client.ask(post("o" + std::string(size - 1, 'x')))).size(), 14 + size);
  }
  CHECK_EQ(world.began, 4);
  const std::string failed = client.ask(post("fail"));
  CHECK_EQ(status_of(failed), 500);
  CHECK_EQ(body_of(failed), std::string(R"({"error":"it \"failed\"\u000a"})"));
  world.server.set_fast(nullptr);
  CHECK_EQ(body_of(client.ask(post("f"))), std::string("POST /predict f"));
}

TEST(a_fast_handler_is_replaced_while_it_answers) {
  World world;
  std::atomic<bool> ended{false};
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&, i] {
      Client client(world.port());
      const std::string body = "f" + std::string(i == 2 ? 10'000 : 10, 'x');
      while (!ended) {
        const std::string answer = client.ask(post(body));
        CHECK_EQ(status_of(answer), 200);
        const std::string said = body_of(answer);
        CHECK(said == "POST /predict " + body || said == "a" + std::to_string(body.size()) ||
              said == "b" + std::to_string(body.size()));
      }
    });
  }
  for (int i = 0; i < 300; ++i) {
    world.server.set_fast(i % 3 == 2 ? nullptr : std::make_shared<Double>(i % 3 == 0 ? "a" : "b"));
    std::this_thread::sleep_for(1ms);
  }
  ended = true;
  for (auto& thread : clients) {
    thread.join();
  }
}

TEST(requests_that_have_begun_are_answered_before_the_server_ends) {
  World world;
  world.hold();
  Client silent(world.port());
  Client kept(world.port());
  CHECK(kept.send(get("/kept")));
  world.wait_for(1);
  Client arriving(world.port());
  CHECK(arriving.send("POST /predict HTTP/1.1\r\ncontent-length: 4\r\n\r\nab"));
  eventually([&] { return world.budget->held() == 2; });
  std::thread ending([&] { world.server.stop(Clock::now() + 60s); });
  CHECK_EQ(silent.rest(), std::string());
  CHECK(arriving.send("cd"));
  world.wait_for(2);
  CHECK(!world.server.stopped());
  world.go_on();
  CHECK(kept.rest().find("connection: close") != std::string::npos);
  const std::string said = arriving.rest();
  CHECK_EQ(body_of(said), std::string("POST /predict abcd"));
  ending.join();
  CHECK(world.server.stopped());
  CHECK(!world.server.take(HttpLane::kRead, Clock::now() + 60s).has_value());
}

TEST(what_takes_longer_than_the_end_allows_is_closed) {
  World world;
  world.hold();
  Client client(world.port());
  CHECK(client.send(post("x")));
  world.wait_for(1);
  const auto began = Clock::now();
  world.server.stop(began + 200ms);
  CHECK(Clock::now() - began >= 200ms);
  CHECK_EQ(client.rest(), std::string());
  world.go_on();  // its answer has nowhere to go
}

TEST(a_server_that_ends_at_once_loses_no_memory) {
  for (int i = 0; i < 20; ++i) {
    HttpServer server(with_predictions({}), std::make_shared<ByteBudget>(1000));
    const Client client(server.port());
    CHECK(
        client.send(i % 2 == 0 ? post("x") : std::string("POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\nab")));
    if (i % 4 == 0) {
      CHECK(server.take(HttpLane::kPrediction, Clock::now() + 60s).has_value());
    }
  }
}

TEST(an_address_that_is_taken_or_unknown_is_an_error) {
  World world;
  HttpOptions options;
  options.port = world.port();
  const auto budget = std::make_shared<ByteBudget>(1000);
  CHECK_THROWS(HttpServer(options, budget), "Address already in use");
  options.host = "192.0.2.1";
  CHECK_THROWS(HttpServer(options, budget), "assign requested address");
  options.connections = 0;
  CHECK_THROWS(HttpServer(options, budget), "connections is 0");
  HttpAnswer answer;
  CHECK_THROWS(answer.add_header("x", "a\r\nb"), "line end");
}

TEST(several_servers_listen_on_one_port_if_they_all_say_so) {
  HttpOptions options;
  options.reuse_port = true;
  World first(options);
  options.port = first.port();
  World second(options);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(status_of(Client(first.port()).ask(get("/"))), 200);
  }
}

}  // namespace shoal::http_test
