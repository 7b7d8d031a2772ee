// UserRule: a rule whose step is a function of the embedding program, such as a method of a Python class.
//
//   params   "class.PATH"    version of the class, for the function
//            "param.NAME"    hyper-parameters, for the function
//            "row_steps"     1: rows count their own steps; 0: `steps` is the table's step number
//            "stateK.NAME"   initial value of state column K, from 0 without gaps, and its name
//
// The engine knows rows, state and what is done with results; the function, one for all user's rules of the
// process, knows the formula. It is set once, before the first step. Each call steps rows in place: any rows
// of a table, in any number of calls, so a formula must treat each row by itself. Unlike other rules it may
// throw. Columns 1, 2, ... are equally far apart.
//
// Threads: several may call the function at once. While it runs, is_stepping() is true in its thread.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/params.h"
#include "optim/block.h"

namespace shoal {

struct UserStep {
  const std::map<std::string, double>& params;
  const Block& block;
  std::size_t states;  // columns of the block after the weights
  bool row_steps;      // block.row_state has each row's number of steps, this one included
  const std::shared_ptr<const void>& storage;  // of the block's arrays: shared by views that outlive the call
};

// A step has failed: the message names the reason.
struct UserStepError : std::runtime_error {
  explicit UserStepError(const std::string& reason)
      : std::runtime_error("a step of the optimizer failed: " + reason) {}
};

using UserFunction = void (*)(const UserStep&);
void set_user_function(UserFunction function) noexcept;

// Whether this thread is in a step of a user's rule, or in another function of a user that the engine calls.
bool is_stepping() noexcept;

// Makes is_stepping() true for its lifetime.
struct InUserCode {
  InUserCode() noexcept;
  ~InUserCode();
  InUserCode(const InUserCode&) = delete;
  InUserCode& operator=(const InUserCode&) = delete;
};

struct UserRule {
  static constexpr std::string_view kName = "UserOptimizer";
  static constexpr bool kDerivesWeights = false;
  static constexpr std::size_t kMaxStates = kMaxColumns - 1;

  explicit UserRule(Params& given);

  std::vector<std::string> columns() const;
  std::string_view row_state() const noexcept {
    return row_steps ? std::string_view("t") : std::string_view();
  }
  void start(const Block& block) const noexcept;
  // What the function throws, a UserStepError.
  void step(const Block& block, const std::shared_ptr<const void>& storage = {}) const;

  std::map<std::string, double> params;
  bool row_steps;
  std::size_t states = 0;
  std::array<float, kMaxStates> initial{};
  std::array<std::string, kMaxStates> names;
};

}  // namespace shoal
