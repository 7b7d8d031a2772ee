// Connections: the open connections of a server by what they wait for, and their deadlines.
//
// Each state (http/server.h) has a list in order of the time since when its connections are in it. All
// deadlines of a state are equally long, so the first of a list is the next to expire, and the longest idle;
// one timer serves all.
//
// Invariants
//   I1  The times of a list do not fall.
//   I2  counted() are the connections of all states but kLingering, whose answer says that they are closed.
//   I3  The timer expires no later than the first deadline.
//
// Threads: the I/O thread.

#pragma once

#include <array>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstddef>
#include <list>
#include <memory>

namespace shoal {

class Connection;

class Connections {
 public:
  using Clock = std::chrono::steady_clock;
  enum State : std::size_t { kSilent, kArriving, kAnswered, kStalled, kLingering, kStates };
  using Timer = boost::asio::basic_waitable_timer<Clock, boost::asio::wait_traits<Clock>,
                                                  boost::asio::io_context::executor_type>;
  using List = std::list<std::shared_ptr<Connection>>;

  // What each connection has for its place here.
  struct Place {
    State state = kSilent;
    Clock::time_point since;
    List::iterator at;
  };

  Connections(boost::asio::io_context& io, Clock::duration request_time);

  void add(std::shared_ptr<Connection> connection, State state);
  void move(Connection& connection, State state, Clock::time_point since);
  void remove(Connection& connection);

  std::size_t counted() const noexcept;
  std::size_t lingering() const noexcept { return lists_[kLingering].size(); }
  // The connection that makes room for a new one; null if all are being answered.
  std::shared_ptr<Connection> replaceable() const;

  // Closes the silent connections now, each other one when it is removed, and all that are left at `end`.
  void stop(Clock::time_point end);
  bool stopping() const noexcept { return stopping_; }

 private:
  void put(List& from, List::iterator at, State state, Clock::time_point since);
  Clock::time_point deadline(State state) const;
  void arm();
  void expire();
  void settle();  // ends the timers once a server that stops has no connections

  const Clock::duration request_time_;
  std::array<List, kStates> lists_;
  Timer timer_;
  Timer end_;
  Clock::time_point armed_ = Clock::time_point::max();
  bool stopping_ = false;
};

}  // namespace shoal
