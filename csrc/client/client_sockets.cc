// Client: sending and receiving, and the connections to endpoints.

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "client/client.h"
#include "client/connection.h"
#include "client/waiter.h"

namespace shoal::client {

void Client::send() {
  if (connected_epoch_ != requests_.map().epoch()) {
    follow_map();
  }
  reopen();
  while (requests_.has_outgoing()) {
    const Outgoing message = requests_.take_outgoing();
    Connection& to = connect(message.peer->endpoint.address);
    if (to.dealer == nullptr) {
      continue;  // sent again when the socket is open
    }
    wire::Header header = message.header;
    std::array<wire::Frame, wire::kMaxFrames> frames;
    for (std::size_t i = 0; i < message.payload.count; ++i) {
      frames.at(i) = message.payload.frames.at(i).bytes;
    }
    std::array<std::byte, sizeof(wire::Header)> encoded;
    wire::encode(header, std::span(frames).first(message.payload.count), encoded);
    const std::size_t bytes =
        to.dealer->send(encoded, std::span(message.payload.frames).first(message.payload.count));
    counts_.bytes_sent += bytes;
    to.is_ready = true;
    if (bytes == 0) {
      drop(to, std::string("a message could not be sent: ") + zmq_.error_text(zmq_.error()));
    }
  }
}

void Client::receive(Connection& connection, const Condition* enough) {
  while (connection.dealer != nullptr && connection.is_ready && (enough == nullptr || !(*enough)())) {
    const MultipartMessage::Result got = connection.dealer->receive(received_);
    if (got == MultipartMessage::Result::kNone) {
      connection.is_ready = false;
      break;
    }
    if (got == MultipartMessage::Result::kClosed) {
      drop(connection, std::string("the socket delivers no more messages: ") + zmq_.error_text(zmq_.error()));
      break;
    }
    counts_.bytes_received += received_.bytes();
    std::array<wire::Frame, MultipartMessage::kMaxFrames> frames;
    for (std::size_t i = 0; i < received_.count(); ++i) {
      frames.at(i) = received_.frame(i);
    }
    const bool is_good =
        requests_.receive(connection.address, std::span(frames).first(received_.count()), steady_now());
    received_.clear();
    if (!is_good) {
      drop(connection, "the received data was damaged");
      break;
    }
    connection.received();
  }
  if (connection.dealer != nullptr && connection.is_monitor_ready) {
    connection.is_monitor_ready = false;
    if (connection.dealer->has_ended()) {
      connection.is_ready = true;
      receive(connection, nullptr);  // messages from before the end
      if (connection.dealer != nullptr) {
        drop(connection, "");
      }
    }
  }
}

// Closes connections to endpoints that have gone, and opens those to backups, which a failover needs.
void Client::follow_map() {
  const SlotMap& map = requests_.map();
  connected_epoch_ = map.epoch();
  std::erase_if(connections_,
                [&](const std::unique_ptr<Connection>& connection) { return !map.has(connection->address); });
  ++connections_version_;
  for (const std::uint32_t backup : map.backups()) {
    connect(map.endpoint(backup).address);
  }
}

Client::Connection& Client::connect(const std::string& address) {
  const auto found = std::ranges::find_if(connections_, [&](const std::unique_ptr<Connection>& connection) {
    return connection->address == address;
  });
  if (found != connections_.end()) {
    return **found;
  }
  connections_.push_back(std::make_unique<Connection>(address));
  reopen();
  return *connections_.back();
}

void Client::drop(Connection& connection, const std::string& reason) {
  connection.drop(reason, steady_now());
  ++connections_version_;
}

// Opens what is due.
void Client::reopen() {
  for (const std::unique_ptr<Connection>& connection : connections_) {
    if (connection->open_at == kNever) {
      continue;
    }
    const Seconds now = steady_now();
    if (connection->open_at > now) {
      continue;
    }
    const bool is_first = connection->reason.empty();
    try {
      connection->open(zmq_, context_,
                       {.what = "the server",
                        .max_reply_bytes = std::int64_t{kMaxReplyBytes},
                        .heartbeat_ms = options_.heartbeat_ms,
                        .silent_ms = options_.silent_ms,
                        .handshake_ms = options_.handshake_ms,
                        .curve_server = options_.curve_server,
                        .curve_public = options_.curve_public,
                        .curve_secret = options_.curve_secret},
                       now);
    } catch (const TransportError&) {  // tried again later
      if (zmq_.error() == zmq::kErrorTerminated) {
        requests_.close(closed(), now);  // the process ends
        connection->open_at = kNever;
      }
      continue;
    }
    ++connections_version_;
    if (poller_ != nullptr) {
      poller_->event.signal();  // it does not sleep on these files
    }
    if (!is_first) {
      requests_.reconnected(connection->address, connection->reason, now);
    }
  }
}

Seconds Client::next_time() const {
  Seconds next = requests_.next_time();
  for (const std::unique_ptr<Connection>& connection : connections_) {
    next = std::min(next, connection->open_at);
  }
  return next;
}

}  // namespace shoal::client
