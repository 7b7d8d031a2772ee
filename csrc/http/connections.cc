#include "http/connections.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "http/connection.h"
#include "http/server.h"

namespace shoal {

Connections::Connections(boost::asio::io_context& io, Clock::duration request_time)
    : request_time_(request_time), timer_(io), end_(io) {}

void Connections::add(std::shared_ptr<Connection> connection, State state) {
  List one;
  one.push_back(std::move(connection));
  put(one, one.begin(), state, Clock::now());
}

void Connections::move(Connection& connection, State state, Clock::time_point since) {
  const Place& place = connection.place();
  put(lists_[place.state], place.at, state, since);
}

void Connections::put(List& from, List::iterator at, State state, Clock::time_point since) {
  List& to = lists_[state];
  auto before = to.end();
  while (before != to.begin() && (std::prev(before) == at || (*std::prev(before))->place().since > since)) {
    --before;
  }
  if (before != at) {
    to.splice(before, from, at);
  }
  Place& place = (*at)->place();
  place.state = state;
  place.since = since;
  place.at = at;
  arm();
}

void Connections::remove(Connection& connection) {
  const Place& place = connection.place();
  lists_[place.state].erase(place.at);
  settle();
}

std::size_t Connections::counted() const noexcept {
  return lists_[kSilent].size() + lists_[kArriving].size() + lists_[kAnswered].size() +
         lists_[kStalled].size();
}

std::shared_ptr<Connection> Connections::replaceable() const {
  if (!lists_[kSilent].empty()) {
    return lists_[kSilent].front();
  }
  const auto& arriving = lists_[kArriving];
  const auto& stalled = lists_[kStalled];
  if (arriving.empty() || stalled.empty()) {
    return arriving.empty() ? (stalled.empty() ? nullptr : stalled.front()) : arriving.front();
  }
  return arriving.front()->place().since <= stalled.front()->place().since ? arriving.front()
                                                                           : stalled.front();
}

Connections::Clock::time_point Connections::deadline(State state) const {
  if (lists_[state].empty() || state == kAnswered) {
    return Clock::time_point::max();
  }
  const auto since = lists_[state].front()->place().since;
  return since + (state == kLingering ? Clock::duration(HttpServer::kLingering) : request_time_);
}

void Connections::arm() {
  const auto first =
      std::min({deadline(kSilent), deadline(kArriving), deadline(kStalled), deadline(kLingering)});
  if (first >= armed_) {
    return;
  }
  armed_ = first;
  timer_.expires_at(first);  // cancels the wait before
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) {
      armed_ = Clock::time_point::max();
      expire();
      arm();
    }
  });
}

void Connections::expire() {
  const auto now = Clock::now();
  for (const State state : {kSilent, kArriving, kStalled, kLingering}) {
    while (deadline(state) <= now) {
      const auto one = lists_[state].front();
      one->expired();  // moves or removes it
    }
  }
}

void Connections::stop(Clock::time_point end) {
  stopping_ = true;
  const List silent = lists_[kSilent];
  for (const auto& one : silent) {
    one->stop();
  }
  end_.expires_at(end);
  end_.async_wait([this](const boost::system::error_code& error) {
    if (!error) {
      for (const List& list : std::array<List, kStates>(lists_)) {
        for (const auto& one : list) {
          one->abort();
        }
      }
    }
  });
  settle();
}

void Connections::settle() {
  if (stopping_ && counted() + lingering() == 0) {
    timer_.cancel();
    end_.cancel();
  }
}

}  // namespace shoal
