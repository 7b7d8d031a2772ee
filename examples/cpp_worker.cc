// A worker of a cluster in C++: it pushes and pulls rows through csrc/client, without Python.
//
//   g++ -std=c++20 -O2 -Icsrc examples/cpp_worker.cc csrc/base/*.cc csrc/batch/*.cc csrc/cache/*.cc csrc/client/*.cc csrc/optim/*.cc csrc/policy/*.cc csrc/shard/*.cc csrc/table/*.cc csrc/transport/*.cc csrc/wire/*.cc -pthread -ldl -o cpp_worker
//   python examples/cpp_worker.py ./cpp_worker
//
// cpp_worker.py joins the cluster, makes the table, and starts this program with the numbers that the scheduler has assigned. It
// stays a member meanwhile, and passes in each newer map: a line of standard input is
//
//   epoch, number of endpoints, (address, server) of each, number of arcs, (first slot, end slot, endpoint) of each,
//   number of endpoints with copies of rows, index of each
//
// In every clock, all workers push a gradient of 1 to each of the rows, whose SGD has a rate of 1 and begins at 0. Under BSP a row
// is then -(clocks * workers), exactly: other values end the program with an error.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "batch/key_batch.h"
#include "client/client.h"

using shoal::client::CallPtr;
using shoal::client::Client;

namespace {

constexpr std::size_t kRows = 1000;
constexpr std::size_t kDim = 4;
constexpr std::uint32_t kClocks = 5;
constexpr double kSeconds = 60;

std::uint32_t number(const char* text) { return static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10)); }

shoal::client::SlotMap map_of(const std::string& line) {
  std::istringstream text(line);
  std::uint32_t epoch = 0;
  std::size_t count = 0;
  text >> epoch >> count;
  std::vector<shoal::client::Endpoint> endpoints(count);
  for (auto& [address, server] : endpoints) {
    text >> address >> server;
  }
  text >> count;
  std::vector<shoal::client::ArcRange> arcs(count);
  for (auto& [first_slot, end_slot, endpoint] : arcs) {
    text >> first_slot >> end_slot >> endpoint;
  }
  text >> count;
  std::vector<std::uint32_t> backups(count);
  for (std::uint32_t& backup : backups) {
    text >> backup;
  }
  if (!text) {
    throw std::invalid_argument("this line is no map: " + line);
  }
  return {epoch, std::move(endpoints), std::move(arcs), std::move(backups)};
}

// The keys of a call and their rows, which the client owns until the call is settled.
struct Rows {
  Rows(const std::vector<std::uint64_t>& keys, shoal::Slots slots, float value)
      : pool(1), batch(keys, slots, pool), values(batch.size() * kDim, value) {}
  shoal::client::Keyed keyed() const {
    return {.hashes = batch.hashes(), .begins = batch.offsets(), .width = kDim * sizeof(float), .dim = kDim};
  }

  shoal::ThreadPool pool;
  shoal::KeyBatch batch;
  std::vector<float> values;
};

void finish(Client& client, const CallPtr& call) {
  if (client.wait(*call, Client::steady_now() + kSeconds) != shoal::client::Waited::kDone) {
    throw std::runtime_error("the " + call->name() + " is not done yet");
  }
  if (call->failure.has_value()) {
    throw std::runtime_error(call->failure->text);
  }
}

void train(Client& client, std::uint32_t table, std::uint32_t workers, std::uint32_t slots) {
  std::vector<std::uint64_t> keys(kRows);
  std::iota(keys.begin(), keys.end(), std::uint64_t{0});
  for (std::uint32_t clock = 1; clock <= kClocks; ++clock) {
    const auto grads = std::make_shared<Rows>(keys, shoal::Slots(slots), 1.0F);
    shoal::client::Keyed pushed = grads->keyed();
    pushed.values = std::as_bytes(std::span<const float>(grads->values));
    client.submit(shoal::wire::Op::kPush, table, pushed, {.keep = grads});
    finish(client, client.tick());

    const auto read = std::make_shared<Rows>(keys, shoal::Slots(slots), 0.0F);
    shoal::client::Keyed pulled = read->keyed();
    pulled.out = std::as_writable_bytes(std::span(read->values));
    finish(client, client.submit(shoal::wire::Op::kPull, table, pulled, {.keep = read}));
    const float wanted = -static_cast<float>(clock * workers);
    if (!std::ranges::all_of(read->values, [&](float value) { return value == wanted; })) {
      throw std::runtime_error("a row is not " + std::to_string(wanted));
    }
    std::cout << "clock " << clock << ": " << kRows << " rows are " << wanted << std::endl;
  }
}

// Does what no thread waits for, and tells what has failed.
void work(Client& client) {
  while (client.wait_for_work()) {
    for (const CallPtr& call : client.calls().take_failed()) {
      std::cerr << call->name() << ": " << call->failure->text << std::endl;
    }
    client.takes_map_request();  // a map is passed in ten times a second
  }
}

}  // namespace

int main(int count, char** given) try {
  if (count != 8) {
    std::cerr << "usage: cpp_worker LIBZMQ RANK INCARNATION JOB CLOCK TABLE WORKERS <MAPS\n";
    return 2;
  }
  std::string line;
  std::getline(std::cin, line);
  shoal::client::SlotMap map = map_of(line);
  const std::uint32_t slots = map.slots();
  const shoal::Zmq zmq = shoal::Zmq::open(given[1]);
  void* const context = zmq.new_context();
  const auto client = std::make_shared<Client>(
      zmq, context,
      shoal::client::WorkerIdentity{
          .rank = number(given[2]), .incarnation = number(given[3]), .job = number(given[4])},
      std::move(map), shoal::client::Policy{}, /*atomic_clocks=*/true,
      shoal::client::ClientOptions{.timeout = kSeconds, .clock = number(given[5])});
  std::thread background([client] { work(*client); });
  std::thread([client] {
    for (std::string newer; std::getline(std::cin, newer);) {
      client->set_map(map_of(newer));
    }
  }).detach();  // it reads as long as the program runs
  int status = 0;
  try {
    train(*client, number(given[6]), number(given[7]), slots);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    status = 1;
  }
  client->close();
  background.join();
  zmq.end_context(context);
  return status;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
