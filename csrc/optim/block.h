// Block: some rows of one table, one array per column: the input of the formulas.
//
//   element e of row r is at [r * dim + e] of every column; a table stores its rows differently
//   (table/layout.h)
//   columns[0]   the weights w, or z for the FTRL family, which derives w
//   columns[k]   the rule's state, as named by its kColumns
//   row_state    one number per row (RowWiseAdagrad's m, Adam's own t), null if the rule has none
//
// A rule steps every row of a block in place; the caller then accepts or discards each row as a whole. So
// formulas are plain loops over arrays, without a branch per row, and a result that is not finite needs no
// rollback.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shoal {

inline constexpr std::size_t kMaxColumns = 5;  // of a user's rule; ours have up to 3

struct Block {
  std::size_t rows = 0;
  std::size_t dim = 0;
  float* grads = nullptr;
  std::array<float*, kMaxColumns> columns{};
  float* row_state = nullptr;
  const std::uint32_t* noise = nullptr;  // base/noise.h: element_noise of each element
  std::uint64_t step = 0;                // the table's step number, 1 for the first push

  std::size_t size() const noexcept { return rows * dim; }
};

}  // namespace shoal
