#include "shard/row_creator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/noise.h"
#include "optim/row_flags.h"
#include "shard/shard_core.h"

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

void RowCreator::make_room(SlotTable& table, std::size_t missing, std::size_t next) {
  const std::size_t rest = batch_.offsets[core_.place_of(batch_.hashes[next - 1]) + 1] - next;
  if (counted_ != &table && rest > table.size() / 8 && !table.index_has_room(missing + rest)) {
    counted_ = &table;
    rows_.resize(rest);
    table.find(batch_.hashes.subspan(next, rest), rows_);
    missing += static_cast<std::size_t>(std::count(rows_.begin(), rows_.end(), nullptr));
  }
  table.make_room(missing);
}

std::size_t RowCreator::insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                                       std::span<std::byte*> rows) const {
  const std::size_t before = slot.table.size();
  slot.table.insert_missing(hashes, rows, [&](std::size_t r, std::byte* row) {
    if (slot.filter != nullptr) {
      slot.filter->forget(hashes[r]);
    }
    core_.initial_row.fill(hashes[r], row);
    core_.rows.metadata().begin(row, terms_.now.clock);
  });
  return slot.table.size() - before;
}

std::size_t RowCreator::admit(SlotState& slot, std::span<std::byte*> rows, std::size_t first) {
  const std::uint64_t* const hashes = batch_.hashes.data() + first;
  std::size_t missing = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) {
      slot.filter->prefetch(hashes[r]);
      ++missing;
    }
  }
  if (!core_.budget.is_limited()) {
    slot.filter->make_room(missing);
  }
  const std::size_t end = batch_.offsets[core_.place_of(hashes[0]) + 1];
  if (slot_ != &slot) {  // slots are independent of each other
    slot_ = &slot;
    asked_ = 0;
    admitted_ = 0;
  }
  std::size_t created = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] != nullptr) {
      continue;
    }
    if (!slot.table.has_room(1)) {
      // Before ask(), because memory may run out. Makes room for as many as will be admitted at the present
      // rate: ascending hashes must not be inserted into a table that grows in small steps.
      slot.table.make_room(1 + (end - first - r) * admitted_ / std::max<std::size_t>(asked_, 1));
    }
    const std::uint32_t count = terms_.counts.empty() ? 1 : terms_.counts[first + r];
    ++asked_;
    if (slot.filter->ask(hashes[r], count, terms_.now)) {
      rows[r] = slot.table.insert(hashes[r]);
      core_.initial_row.fill(hashes[r], rows[r]);
      core_.rows.metadata().begin(rows[r], terms_.now.clock);
      ++created;
      ++admitted_;
    } else {
      refused_ += count;
    }
  }
  return created;
}

std::size_t RowCreator::create(Probe& run, std::size_t first) {
  std::size_t created = 0;
  for (const Probe::Part& part : run.parts()) {
    const std::size_t size = part.end - part.begin;
    const std::span<std::byte*> rows = run.rows().subspan(part.begin, size);
    const auto missing = static_cast<std::size_t>(std::count(rows.begin(), rows.end(), nullptr));
    if (missing == 0) {
      continue;
    }
    SlotState& slot = *core_.states[core_.place_of(batch_.hashes[first + part.begin])];
    if (terms_.asks) {
      created += admit(slot, rows, first + part.begin);
      continue;
    }
    make_room(*part.table, missing, first + part.end);
    created += insert_missing(slot, batch_.hashes.subspan(first + part.begin, size), rows);
    slot.fills |= missing > size / kFewMissing;
  }
  if (created != 0 || terms_.asks) {
    run.resolve();  // inserts or growth may have moved rows
  }
  return created;
}

std::size_t RowCreator::create_all(SlotState& slot, std::span<const std::uint64_t> hashes) {
  rows_.resize(hashes.size());
  slot.table.find(hashes, rows_);
  const auto missing = static_cast<std::size_t>(std::count(rows_.begin(), rows_.end(), nullptr));
  slot.fills = missing > hashes.size() / kFewMissing;
  slot.table.make_room(missing);
  return insert_missing(slot, hashes, rows_);
}

}  // namespace shoal
