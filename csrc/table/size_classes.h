// SizeClasses: the sizes to which the index of a slot grows: by 1/8 from kLarge rows on. Below, it grows by
// 1/2, so a key is moved two or three times instead of five: little memory is at stake there, and keys arrive
// fastest. The classes of each slot are shifted, so that not all slots of a table grow at once.
//
// Threads: immutable.

#pragma once

#include <cstddef>

#include "table/layout.h"

namespace shoal {

class SizeClasses {
 public:
  SizeClasses(const Layout& layout, Slot slot) noexcept;

  std::size_t rows_above(std::size_t rows) const noexcept;
  std::size_t buckets_for(std::size_t rows, std::size_t cells) const noexcept;  // of so many cells
  std::size_t limit_of(std::size_t buckets, std::size_t cells) const noexcept;  // rows

 private:
  double load_limit_;
  double phase_;  // shift of the classes, in [0, 1) classes
};

}  // namespace shoal
