// DedupWindow: which writes of one worker have been applied, so that each is applied exactly once: a sliding
// window of sequence numbers, as in IPsec anti-replay (RFC 4303), once per slot: the greatest number seen and
// a bit for each of the 64 up to it. A message may be sent again with other slots, or to another endpoint:
// each slot accepts the call once.
//
//   top 70, mask ...1011     70 seen, 69 seen, 68 not, 67 seen; 6 and less count as seen
//
// A worker keeps the numbers of its calls in flight within a span of 64: a number below the window has been
// acknowledged. calls() is the window of the arc: a message of the call has been here (ticks name these).
// What a repeated call is answered with is kept by its number: erased(), answer(), swept(), partial_push().
//
// Memory: 16 bytes per slot and worker that writes.
// Threads: none of its own; one owner.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/byte_stream.h"

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

  void save(ByteWriter& out) const {
    out.put(top_);
    out.put(mask_);
  }
  void restore(ByteReader& in) {
    top_ = in.take<std::uint64_t>("window");
    mask_ = in.take<std::uint64_t>("window");
  }
  bool operator==(const SequenceWindow&) const = default;

 private:
  std::uint64_t top_ = 0;
  std::uint64_t mask_ = ~std::uint64_t{0};  // numbers begin at 1
};

class DedupWindow {
 public:
  // Of the slots [first, end).
  DedupWindow(std::size_t first, std::size_t end) : first_(first), slots_(end - first) {}

  SequenceWindow& slot(std::size_t s) noexcept { return slots_[s - first_]; }
  SequenceWindow& calls() noexcept { return calls_; }

  // Slot, rows, slot, rows, ...: the messages of a call may be cut along other slots when they are sent
  // again. Empty: none.
  std::span<const std::uint64_t> find_erased(std::uint64_t number) const noexcept {
    const auto found = erased_.find(number);
    return found == erased_.end() ? std::span<const std::uint64_t>() : found->second;
  }

  // Drops the results of calls that have left the window.
  std::vector<std::uint64_t>& erased(std::uint64_t number) { return kept(erased_, number); }
  std::vector<double>& answer(std::uint64_t number) { return kept(answers_, number); }
  std::vector<std::uint64_t>& swept(std::uint64_t number) { return kept(swept_, number); }

  // A push that ran out of memory inside a slot: the slot's rows below `next` are stepped, the others are
  // not. The call was answered with an error; when it is sent again, it continues there.
  struct PartialPush {
    std::uint64_t number = 0;
    std::uint64_t next = 0;  // a hash
  };
  // That of the call with this number, or null.
  PartialPush* partial_push(std::uint64_t number) noexcept {
    for (PartialPush& partial : partial_pushes_) {
      if (partial.number == number) {
        return &partial;
      }
    }
    return nullptr;
  }
  // Never allocates: it is called when memory is exhausted.
  void set_partial_push(std::uint64_t number, std::uint64_t next) noexcept {
    PartialPush* entry = partial_push(number);
    if (entry == nullptr) {
      entry = &partial_pushes_[number % partial_pushes_.size()];
    }
    *entry = {number, next};
  }

  // Whether no write has been here.
  bool is_new() const noexcept {
    const auto none = [](const auto& entry) { return entry.number == 0; };
    return calls_ == SequenceWindow() &&
           std::ranges::all_of(slots_, [](const SequenceWindow& slot) { return slot == SequenceWindow(); }) &&
           erased_.empty() && std::ranges::all_of(partial_pushes_, none);
  }
  void save(ByteWriter& out) const {
    for (const SequenceWindow& slot : slots_) {
      slot.save(out);
    }
    calls_.save(out);
    for (const PartialPush& one : partial_pushes_) {
      out.put(one.number);
      out.put(one.next);
    }
    save_answers(erased_, out);
    save_answers(answers_, out);
    save_answers(swept_, out);
  }
  // Into a new one, of the same slots.
  void restore(ByteReader& in) {
    for (SequenceWindow& slot : slots_) {
      slot.restore(in);
    }
    calls_.restore(in);
    for (PartialPush& one : partial_pushes_) {
      one.number = in.take<std::uint64_t>("partial push");
      one.next = in.take<std::uint64_t>("partial push");
    }
    restore_answers(erased_, in);
    restore_answers(answers_, in);
    restore_answers(swept_, in);
  }

 private:
  template <class T>
  using Answers = std::map<std::uint64_t, std::vector<T>>;  // by number

  // Without those of calls that failed, which have no numbers.
  template <class T>
  static void save_answers(const Answers<T>& answers, ByteWriter& out) {
    out.put(static_cast<std::uint64_t>(
        std::ranges::count_if(answers, [](const auto& answer) { return !answer.second.empty(); })));
    for (const auto& [number, numbers] : answers) {
      if (!numbers.empty()) {
        out.put(number);
        out.put_array(std::span<const T>(numbers));
      }
    }
  }
  template <class T>
  static void restore_answers(Answers<T>& answers, ByteReader& in) {
    for (std::size_t left = in.take_count("answers", 2 * sizeof(std::uint64_t)); left != 0; --left) {
      const auto number = in.take<std::uint64_t>("answer");
      answers[number] = in.take_array<T>("answer");
    }
  }

  template <class T>
  static std::vector<T>& kept(Answers<T>& answers, std::uint64_t number) {
    answers.erase(answers.begin(),
                  answers.lower_bound(number < SequenceWindow::kSpan ? 0 : number - SequenceWindow::kSpan));
    return answers[number];
  }

  std::size_t first_;
  std::vector<SequenceWindow> slots_;
  SequenceWindow calls_;
  std::array<PartialPush, SequenceWindow::kSpan> partial_pushes_{};
  Answers<std::uint64_t> erased_;
  Answers<double> answers_;
  Answers<std::uint64_t> swept_;
};

}  // namespace shoal
