#include "shard/initial_row.h"

#include <array>
#include <cstring>
#include <utility>

#include "base/noise.h"
#include "optim/row_flags.h"

namespace shoal {

InitialRow::InitialRow(const TableSpec& spec, const Rows& rows) : spec_(spec), rows_(rows) {
  if (spec.init.same_for_all() && spec.dtype == Dtype::kFloat32) {
    std::vector<std::byte> row(rows.bytes());
    fill(0, row.data());
    same_ = std::move(row);
  }
}

void InitialRow::fill(std::uint64_t hash, std::byte* row) const noexcept {
  if (!same_.empty()) {
    std::memcpy(row, same_.data(), same_.size());
    return;
  }
  // One row of up to kMaxDim elements and kMaxColumns columns: small enough for the stack.
  std::array<std::array<float, Rows::kMaxDim>, kMaxColumns> columns;
  std::array<std::uint32_t, Rows::kMaxDim> noise;
  float row_state = 0.0F;
  const Block block{.rows = 1,
                    .dim = rows_.dim(),
                    .grads = nullptr,
                    .columns = {columns[0].data(), columns[1].data(), columns[2].data(), columns[3].data(),
                                columns[4].data()},
                    .row_state = &row_state,
                    .noise = noise.data(),
                    .step = 0};
  spec_.init.fill(hash, rows_.dim(), block.columns[0]);
  std::visit([&](const auto& rule) { rule.start(block); }, spec_.optimizer.rule());
  fill_noise({&hash, 1}, rows_.dim(), step_noise(spec_.seed, 0), noise.data());  // no push has step 0
  const std::uint32_t take = 1;
  PrefetchCursor none;
  rows_.scatter(block, {&take, 1}, {&row, 1}, none);
  const std::size_t marked = rows_.metadata().columns() * sizeof(std::uint32_t);
  std::memset(row + rows_.bytes() - marked, 0, marked);
}

}  // namespace shoal
