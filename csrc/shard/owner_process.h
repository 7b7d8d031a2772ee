// OwnerProcess: the process that may use an object: locks that were held at a fork are never released in the
// child.
//
// Threads: a value.

#pragma once

#include <cstddef>
#include <stdexcept>

#include "base/threads.h"

namespace shoal {

struct WrongProcessError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class OwnerProcess {
 public:
  bool is_current() const noexcept { return stamp_ == process_stamp(); }
  void check() const {
    if (!is_current()) {
      throw WrongProcessError(
          "this store was made before a fork and belongs to the parent process: make a store of its own in "
          "the "
          "child, or start children with the 'spawn' method");
    }
  }

 private:
  std::size_t stamp_ = process_stamp();
};

}  // namespace shoal
