// DedupWindow: which writes of one worker have been done, so that each is done once.
//
// Idea. A worker numbers its calls that change something 1, 2, 3, ...; a call's parts at several endpoints, and a part
// that is sent again, carry the same number. Every slot remembers the last numbers, so a part may be sent again with other
// slots beside it, or to another endpoint: each slot takes it once.
//
//   SequenceWindow           top, the greatest number seen, and a bit for each of the 64 numbers up to it
//   slot(s)          of slot s
//   calls()          of this endpoint: a part of the call has been here (a tick names these)
//   erased(number)   how many rows the call erased here, for when its reply must be given again
//   answer(number)   the numbers that a function answered when it changed rows, for the same
//   swept(number)    those of a sweep
//   postpone(number)  counts how often the call was told to come again later
//
//   top 70, mask ...1011     70 seen, 69 seen, 68 not, 67 seen; 6 and less count as seen
//
// A worker keeps the numbers of its calls under way within a span of 64: what falls out of the window has been
// acknowledged.
//
// Memory: 16 bytes a slot and worker, once the worker writes.
// Threads: none of its own; one owner.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace shoal {

class SequenceWindow {
 public:
  static constexpr std::uint64_t kSpan = 64;

  bool contains(std::uint64_t number) const noexcept {
    if (number > top_) {
      return false;
    }
    const std::uint64_t back = top_ - number;
    return back >= kSpan || ((mask_ >> back) & 1U) != 0;
  }

  void mark(std::uint64_t number) noexcept {
    if (number > top_) {
      const std::uint64_t up = number - top_;
      mask_ = (up < kSpan ? mask_ << up : 0) | 1U;
      top_ = number;
    } else if (top_ - number < kSpan) {
      mask_ |= std::uint64_t{1} << (top_ - number);
    }
  }

 private:
  std::uint64_t top_ = 0;
  std::uint64_t mask_ = ~std::uint64_t{0};  // nothing is numbered 0 or less
};

class DedupWindow {
 public:
  explicit DedupWindow(std::size_t slots) : slots_(slots) {}

  SequenceWindow& slot(std::size_t s) noexcept { return slots_[s]; }
  SequenceWindow& calls() noexcept { return calls_; }

  std::uint64_t erased(std::uint64_t number) const noexcept {
    const Erased& last = erased_[number % erased_.size()];
    return last.number == number ? last.rows : 0;
  }
  void add_erased(std::uint64_t number, std::uint64_t rows) noexcept {
    Erased& last = erased_[number % erased_.size()];
    last = {number, rows + (last.number == number ? last.rows : 0)};
  }

  // What it held for a call that has left the window is forgotten.
  std::vector<double>& answer(std::uint64_t number) { return kept(answers_, number); }
  std::vector<std::uint64_t>& swept(std::uint64_t number) { return kept(swept_, number); }

  // A call that is told to come again later: at most so many times, then false.
  bool postpone(std::uint64_t number, std::uint32_t most) noexcept {
    Postponed& last = postponed_[number % postponed_.size()];
    last = {number, last.number == number ? last.times + 1 : 1};
    return last.times <= most;
  }

  // A push that memory stopped halfway: one slot of it has the rows below `next` and not the others. The call was answered
  // with an error; sent again, it goes on there.
  struct PartialPush {
    std::uint64_t number = 0;
    std::uint64_t next = 0;  // a hash
  };
  // Of the call with this number; null where none was stopped.
  PartialPush* partial_push(std::uint64_t number) noexcept {
    for (PartialPush& partial : partial_pushes_) {
      if (partial.number == number) {
        return &partial;
      }
    }
    return nullptr;
  }
  // Never allocates: it is called when there is no memory.
  void set_partial_push(std::uint64_t number, std::uint64_t next) noexcept {
    PartialPush* place = partial_push(number);
    if (place == nullptr) {
      place = &partial_pushes_[number % partial_pushes_.size()];
    }
    *place = {number, next};
  }

 private:
  struct Erased {
    std::uint64_t number = 0;
    std::uint64_t rows = 0;
  };
  struct Postponed {
    std::uint64_t number = 0;
    std::uint32_t times = 0;
  };
  template <class T>
  using Answers = std::map<std::uint64_t, std::vector<T>>;  // by number

  template <class T>
  static std::vector<T>& kept(Answers<T>& answers, std::uint64_t number) {
    answers.erase(answers.begin(),
                  answers.lower_bound(number < SequenceWindow::kSpan ? 0 : number - SequenceWindow::kSpan));
    return answers[number];
  }

  std::vector<SequenceWindow> slots_;
  SequenceWindow calls_;
  std::array<Erased, SequenceWindow::kSpan> erased_{};
  std::array<PartialPush, SequenceWindow::kSpan> partial_pushes_{};
  std::array<Postponed, SequenceWindow::kSpan> postponed_{};
  Answers<double> answers_;
  Answers<std::uint64_t> swept_;
};

}  // namespace shoal
