// User functions over the rows of a table, such as Python functions, called in the process that holds the
// rows: once for each slot that has rows, in the order of the slots, with copies of all these rows in hash
// order; or with those of given hashes that exist. No slot is locked while it runs. After a failure no
// further slot is processed: the changes of earlier slots stay.
//
//   kMap     its words are the result of the slot
//   kApply   what it has changed is written, all rows of the slot or, if it fails, none. Weights that changed
//            move the columns from which they are derived (FTRL). A row that would not be finite is left
//            unchanged and counted. Other writers of the table wait from the first slot to the last.
//
// docs/wire-format.md (REDUCE) has the parameters and results. There is one function for all descriptions,
// set once, before the first call.
//
// Threads: several may call the function at the same time. While it runs, is_stepping() is true in its
// thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/int64_pairs.h"
#include "optim/block.h"

namespace shoal {

class Shard;

struct RowsCall {
  std::span<const std::byte> description;
  bool writes;
  std::span<const std::uint64_t> hashes;
  const Block& block;  // without gradients
  float* weights;      // of the rows; columns[0] of the block, unless they are derived
  std::span<const std::string> columns;
  Elements elements;  // of weights
  bool derives_weights;
  std::string_view row_state;                  // its name, or none
  const std::shared_ptr<const void>& storage;  // of the arrays: shared by views that outlive the call
};

// Whether the last call of these results has failed: its first word is then kUserFailed
// (python/shoal/user_functions.py).
inline constexpr double kUserFailed = 3;
bool user_function_failed(std::span<const double> results) noexcept;

// Appends words; false: it has failed, and the words say why.
using RowsFunction = bool (*)(const RowsCall&, std::vector<double>&);
void set_rows_function(RowsFunction function) noexcept;

// Runs it over the rows in memory of the slots [first, end), which `writes` lets it change. The words of each
// slot, after its number and their number.
std::vector<double> run_user_function(Shard& shard, bool writes, std::span<const double> parameters,
                                      std::size_t first, std::size_t end);

}  // namespace shoal
