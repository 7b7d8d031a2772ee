// LocalSteps: steps of a table's optimizer in a worker's copies of its rows.
//
//   copy    a whole row as the servers send it: its columns, dim floats each, then its row state
//   step    the rule's own formula, on float32
//   change  a copy after some steps less the copy before them; the servers add it to the row
//
// Narrow rows are copied into a Block, whose columns are long enough for wide instructions, and back; wide
// ones are stepped where they are, as a shard does. The bits are the same. Only rules have this whose numbers
// are sums over their steps (Optimizer::adds_up): two workers that start from the same row then add what each
// of them has changed, as two asynchronous workers without copies add what the servers compute from old
// weights.
//
// Threads: one at a time; the owner locks.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"
#include "shard/rows.h"

namespace shoal {

class LocalSteps {
 public:
  static constexpr std::size_t kBlock = 32;             // rows
  static constexpr std::uint64_t kSeed = 0x6c6f63616c;  // of the rounding noise: another than any table's

  // Whether what steps change in rows adds up, and fits in a message.
  static bool suits(const Optimizer& optimizer, std::size_t dim) noexcept;
  // std::invalid_argument: it does not.
  LocalSteps(std::size_t dim, Optimizer optimizer);

  std::size_t floats() const noexcept { return rows_.floats(); }

  bool derives_weights() const noexcept { return optimizer_.derives_weights(); }

  // Writes the weights of whole rows: dim numbers for each. Where they are not derived, they are a row's
  // first numbers.
  void weights(std::span<std::byte* const> rows, float* weights);
  // Makes a step in each row. A row whose gradient is all zero, or whose gradient or new numbers are not all
  // finite, keeps every bit. Returns how many were not finite.
  std::size_t step(std::span<std::byte* const> rows, std::span<const std::uint64_t> hashes,
                   const float* grads);

 private:
  Block block(std::size_t rows) noexcept;
  std::size_t step_block(std::span<std::byte* const> rows, std::span<const std::uint64_t> hashes,
                         const float* grads);

  Optimizer optimizer_;
  Rows rows_;
  std::vector<float> scratch_;  // columns of kBlock rows, and their state
  std::vector<float> grads_;    // of a block, or clipped
  std::vector<std::uint32_t> noise_;
  std::array<std::uint32_t, kBlock> moves_;
  std::array<std::uint32_t, kBlock> finite_;
  std::uint64_t steps_ = 0;
};

}  // namespace shoal
