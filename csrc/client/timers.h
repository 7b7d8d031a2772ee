// Timers: when something is due, each thing at most once: a binary heap whose entries know their places.
//
//   Timer   what is due; a base of it
//
// Of equal times the one that was set first is due first. A Timer that is destroyed must not be set.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace shoal::client {

using Seconds = double;

inline constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();

struct Timer {
  static constexpr std::size_t kUnset = std::numeric_limits<std::size_t>::max();

  Seconds due = kNever;
  std::uint64_t order = 0;
  std::size_t place = kUnset;
  bool is_call = false;
};

class Timers {
 public:
  // Sets the time at which something is due, in place of the one that it had.
  void set(Timer& timer, Seconds due) {
    if (timer.place == Timer::kUnset) {
      heap_.push_back(&timer);
      timer.place = heap_.size() - 1;
    }
    timer.due = due;
    timer.order = ++count_;
    down(up(timer.place));
  }

  void unset(Timer& timer) noexcept {
    if (timer.place == Timer::kUnset) {
      return;
    }
    const std::size_t place = std::exchange(timer.place, Timer::kUnset);
    Timer* const last = heap_.back();
    heap_.pop_back();
    if (last != &timer) {
      heap_[place] = last;
      last->place = place;
      down(up(place));
    }
  }

  // Takes the first that is due by then; null if none is.
  Timer* take(Seconds now) noexcept {
    if (heap_.empty() || heap_.front()->due > now) {
      return nullptr;
    }
    Timer* const first = heap_.front();
    unset(*first);
    return first;
  }

  Seconds next() const noexcept { return heap_.empty() ? kNever : heap_.front()->due; }
  std::size_t size() const noexcept { return heap_.size(); }

 private:
  static bool before(const Timer& a, const Timer& b) noexcept {
    return a.due < b.due || (a.due == b.due && a.order < b.order);
  }
  void swap(std::size_t a, std::size_t b) noexcept {
    std::swap(heap_[a], heap_[b]);
    heap_[a]->place = a;
    heap_[b]->place = b;
  }
  std::size_t up(std::size_t place) noexcept {
    while (place > 0 && before(*heap_[place], *heap_[(place - 1) / 2])) {
      swap(place, (place - 1) / 2);
      place = (place - 1) / 2;
    }
    return place;
  }
  void down(std::size_t place) noexcept {
    for (std::size_t child = 2 * place + 1; child < heap_.size(); child = 2 * place + 1) {
      if (child + 1 < heap_.size() && before(*heap_[child + 1], *heap_[child])) {
        ++child;
      }
      if (!before(*heap_[child], *heap_[place])) {
        return;
      }
      swap(place, child);
      place = child;
    }
  }

  std::vector<Timer*> heap_;
  std::uint64_t count_ = 0;
};

}  // namespace shoal::client
