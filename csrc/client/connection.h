// Client::Connection: the Dealer of one endpoint, replaced whenever its connection ends.
//
//   open --ended--> dropped until `open_at` --reopen()--> open
//
// Connections are opened as fast as they end, but not in a busy loop: each lives for kShortest seconds at
// least, and for twice as long as the one before where nothing was received. libzmq repeats refused attempts
// to connect.

#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "client/client.h"
#include "transport/dealer.h"

namespace shoal::client {

class Client::Connection {
 public:
  explicit Connection(std::string address_of) : address(std::move(address_of)) {}

  // Throws TransportError, and is dropped then.
  void open(const Zmq& zmq, void* context, const DealerOptions& options, Seconds now) {
    opened_ = now;
    open_at = kNever;
    ++fruitless_;
    is_ready = is_monitor_ready = true;
    try {
      dealer = std::make_unique<Dealer>(zmq, context, address, options);
    } catch (const TransportError& error) {
      drop(std::string("no socket could be opened: ") + error.what(), now);
      throw;
    }
  }
  void received() noexcept { fruitless_ = 0; }
  // `why`: empty if the connection ended by itself.
  void drop(const std::string& why, Seconds now) {
    const bool was_greeted = dealer != nullptr && dealer->is_greeted();
    dealer.reset();
    reason = !why.empty()  ? why
             : was_greeted ? "the process at its other end has ended, or it was cut or damaged on the way"
                           : "there was no common handshake";
    const Seconds longest = was_greeted ? kLongest : kLongestUngreeted;
    open_at = std::max(now, opened_ + std::min(kShortest * std::pow(2.0, std::min(fruitless_, 30)), longest));
  }

  const std::string address;
  std::unique_ptr<Dealer> dealer;  // null until open_at
  Seconds open_at = 0;
  std::string reason;             // why the last one ended
  bool is_ready = false;          // there may be something to receive
  bool is_monitor_ready = false;  // it may have ended

 private:
  static constexpr Seconds kShortest = 0.01;  // from one opening to the next
  static constexpr Seconds kLongest = 0.1;
  static constexpr Seconds kLongestUngreeted = 1.0;  // where there is no common handshake

  Seconds opened_ = -kNever;
  int fruitless_ = 0;  // connections in a row over which nothing was received
};

}  // namespace shoal::client
