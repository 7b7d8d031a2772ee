// UserArrays: rows of a batch or of a slot as the arrays that a user's code gets, in one piece of memory:
//
//   columns     columns x n x dim floats
//   row state   n floats if there is one
//   extra       floats of the caller: gradients, derived weights, copies
//   flags       n moves, n finite (optim/row_flags.h)
//
// Threads: several may use the blocks of different rows.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "optim/block.h"
#include "shard/rows.h"

namespace shoal {

class UserArrays {
 public:
  // Of `size` rows, with `extra` floats; memory has to be claimed first.
  UserArrays(const Rows& rows, std::size_t size, std::size_t extra) noexcept
      : n_(size),
        dim_(rows.dim()),
        columns_(rows.columns()),
        row_state_at_(columns_ * n_ * dim_),
        extra_at_(n_ * rows.floats()),
        flags_at_(extra_at_ + extra) {}

  // Claims the storage, or makes another if arrays over it, which may outlive a call, are still in use.
  void claim(std::shared_ptr<Buffer<std::byte>>& storage) {
    if (storage == nullptr || storage.use_count() != 1) {
      storage = std::make_shared<Buffer<std::byte>>();
    }
    floats_ = reinterpret_cast<float*>(storage->claim(sizeof(float) * (flags_at_ + 2 * n_)).data());
  }

  // The rows from number `first` on, without gradients and noise.
  Block block(std::size_t first, std::size_t count) const noexcept {
    Block block{.rows = count,
                .dim = dim_,
                .grads = nullptr,
                .columns = {},
                .row_state = floats_ + row_state_at_ + first,
                .noise = nullptr,
                .step = 0};
    for (std::size_t k = 0; k < columns_; ++k) {
      block.columns[k] = floats_ + (k * n_ + first) * dim_;
    }
    return block;
  }
  float* floats() const noexcept { return floats_; }
  float* extra() const noexcept { return floats_ + extra_at_; }
  std::uint32_t* moves() const noexcept { return reinterpret_cast<std::uint32_t*>(floats_ + flags_at_); }
  std::uint32_t* finite() const noexcept { return moves() + n_; }

 private:
  std::size_t n_;
  std::size_t dim_;
  std::size_t columns_;
  std::size_t row_state_at_;
  std::size_t extra_at_;
  std::size_t flags_at_;
  float* floats_ = nullptr;
};

}  // namespace shoal
