// Schedule: by what the learning rate is multiplied at a clock of the table.
//
//   c < warmup    (c + 1) / warmup                                        a line up to 1; below, c counts from there
//   constant      1
//   steps         factor ^ floor(c / clocks)
//   linear        1 - (1 - floor) * min(c, clocks) / clocks
//   cosine        floor + (1 - floor) * (1 + cos(pi * min(c, clocks) / clocks)) / 2   (Loshchilov, Hutter, ICLR'17)
//   inverse root  1 / sqrt(1 + c / clocks)
//
// In float64, rounded once to float32. It is a function of the clock alone: servers that apply a clock's pushes find the
// same rate without a word, and a table that was loaded goes on with it.
//
// Threads: immutable.

#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace shoal {

class Schedule {
 public:
  enum class Kind : std::uint8_t { kNone, kConstant, kSteps, kLinear, kCosine, kInverseRoot };

  Schedule() = default;
  // Takes its parameters out of an optimizer's: schedule (the number of a kind; without it there is none),
  // schedule_warmup, schedule_clocks, schedule_factor or schedule_floor. Bad ones: std::invalid_argument.
  static Schedule take(std::map<std::string, double>& params);

  bool active() const noexcept { return kind_ != Kind::kNone; }
  float at(std::uint32_t clock) const noexcept;

 private:
  Kind kind_ = Kind::kNone;
  double warmup_ = 0;
  double clocks_ = 1;
  double level_ = 0;  // the factor, or the floor
};

}  // namespace shoal
