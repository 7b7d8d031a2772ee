// Schedule: the factor of the learning rate at each clock of a table.
//
//   c < warmup    (c + 1) / warmup                 linear to 1; below, c counts from its end
//   constant      1
//   steps         factor ^ floor(c / clocks)
//   linear        1 - (1 - floor) * min(c, clocks) / clocks
//   cosine        floor + (1 - floor) * (1 + cos(pi * min(c, clocks) / clocks)) / 2   (SGDR, ICLR'17)
//   inverse root  1 / sqrt(1 + c / clocks)
//
// In float64, rounded once to float32. A function of the clock alone: all servers that apply a clock's pushes
// use the same rate without communication, and a loaded table continues with it.
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
  // Takes its parameters out of an optimizer's: schedule (the number of a kind; without it there is no
  // schedule), schedule_warmup, schedule_clocks, schedule_factor or schedule_floor. Invalid ones:
  // std::invalid_argument.
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
