// Optimizer: one of the rules, chosen by name, with the clipping in front of it.
//
// A rule is a struct of float32 constants, formed from float64 hyper-parameters and rounded once, with
//   kName, kColumns          its name and the names of its columns; columns[0] is w unless kDerivesWeights
//   row_state()              the name of its number per row, or none
//   start(block)             columns[0] holds initial weights; makes them a fresh row
//   step(block)              one step of every row
//   step(rows)               the same, of wide rows where they stand; a rule of pairs has none (optim/in_place.h)
//   kPairs                   where it is there, a row has two elements, of which only the first is a weight
//   read, write, move        weights from columns and back, only where kDerivesWeights
// std::visit once per batch; no choice is left inside a loop over rows.

#pragma once

#include <span>
#include <string_view>
#include <variant>

#include "optim/adagrad.h"
#include "optim/adam.h"
#include "optim/clip.h"
#include "optim/ftrl.h"
#include "optim/group_ftrl.h"
#include "optim/momentum.h"
#include "optim/proximal.h"
#include "optim/rowwise_adagrad.h"
#include "optim/sgd.h"

namespace shoal {

using Rule = std::variant<Sgd, Momentum, Adagrad, RowWiseAdagrad, Ftrl, GroupFtrl, Adam, Proximal>;

class Optimizer {
 public:
  // Unknown names, unknown, missing or bad parameters: std::invalid_argument that names them. clip_value and
  // clip_norm are parameters of every rule and may be left out.
  Optimizer(std::string_view name, std::map<std::string, double> params);

  const Rule& rule() const noexcept { return rule_; }
  const Clip& clip() const noexcept { return clip_; }

  std::span<const std::string_view> columns() const noexcept;
  bool derives_weights() const noexcept;
  std::string_view row_state() const noexcept;
  // Whether a row is a weight and something beside it: dim is 2, and only a step may change it.
  bool pairs() const noexcept;

 private:
  Clip clip_;
  Rule rule_;
};

}  // namespace shoal
