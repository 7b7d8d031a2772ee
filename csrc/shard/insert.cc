// Creation of a Shard's rows: the initial row of a key, admission, and room in a slot's table before inserts.

#include <algorithm>
#include <array>
#include <cstring>

#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

void Shard::fill_initial_row(std::uint64_t hash, std::byte* row) const noexcept {
  if (!initial_row_.empty()) {
    std::memcpy(row, initial_row_.data(), initial_row_.size());
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

void Shard::make_room(SlotTable& table, std::size_t missing, const SlotSlices& batch, std::size_t next,
                      InsertContext& context) const {
  const std::size_t rest = batch.offsets[slot_position(batch.hashes[next - 1]) + 1] - next;
  if (context.counted != &table && rest > table.size() / 8 && !table.index_has_room(missing + rest)) {
    context.counted = &table;
    context.rows.resize(rest);
    table.find(batch.hashes.subspan(next, rest), context.rows);
    missing += static_cast<std::size_t>(std::count(context.rows.begin(), context.rows.end(), nullptr));
  }
  table.make_room(missing);
}

std::size_t Shard::insert_missing(SlotState& slot, std::span<const std::uint64_t> hashes,
                                  std::span<std::byte*> rows, std::uint32_t now) const {
  const std::size_t before = slot.table.size();
  slot.table.insert_missing(hashes, rows, [&](std::size_t r, std::byte* row) {
    if (slot.filter != nullptr) {
      slot.filter->forget(hashes[r]);
    }
    fill_initial_row(hashes[r], row);
    rows_.metadata().begin(row, now);
  });
  return slot.table.size() - before;
}

std::size_t Shard::admit(SlotState& slot, const SlotSlices& batch, std::span<std::byte*> rows,
                         std::size_t first, InsertContext& context) const {
  const std::uint64_t* const hashes = batch.hashes.data() + first;
  std::size_t missing = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) {
      slot.filter->prefetch(hashes[r]);
      ++missing;
    }
  }
  if (budget_ == nullptr) {
    slot.filter->make_room(missing);
  }
  const std::size_t end = batch.offsets[slot_position(hashes[0]) + 1];
  if (context.at != &slot) {  // slots are independent of each other
    context.at = &slot;
    context.asked = 0;
    context.admitted = 0;
  }
  std::size_t admitted = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] != nullptr) {
      continue;
    }
    if (!slot.table.has_room(1)) {
      // Before ask(), because memory may run out. Makes room for as many as will be admitted at the present rate:
      // ascending hashes must not be inserted into a table that grows in small steps.
      slot.table.make_room(1 +
                           (end - first - r) * context.admitted / std::max<std::size_t>(context.asked, 1));
    }
    const std::uint32_t count = context.counts.empty() ? 1 : context.counts[first + r];
    ++context.asked;
    if (slot.filter->ask(hashes[r], count, context.now)) {
      rows[r] = slot.table.insert(hashes[r]);
      fill_initial_row(hashes[r], rows[r]);
      rows_.metadata().begin(rows[r], context.now.clock);
      ++admitted;
      ++context.admitted;
    } else {
      context.refused += count;
    }
  }
  return admitted;
}

std::size_t Shard::create(Probe& run, const SlotSlices& batch, std::size_t first,
                          InsertContext& context) const {
  std::size_t created = 0;
  for (const Probe::Part& part : run.parts()) {
    const std::size_t size = part.end - part.begin;
    const std::span<std::byte*> rows = run.rows().subspan(part.begin, size);
    const auto missing = static_cast<std::size_t>(std::count(rows.begin(), rows.end(), nullptr));
    if (missing == 0) {
      continue;
    }
    SlotState& slot = *tables_[slot_position(batch.hashes[first + part.begin])];
    const auto hashes = batch.hashes.subspan(first + part.begin, size);
    if (context.asks) {
      created += admit(slot, batch, rows, first + part.begin, context);
      continue;
    }
    make_room(*part.table, missing, batch, first + part.end, context);
    created += insert_missing(slot, hashes, rows, context.now.clock);
    slot.fills |= missing > size / kFewMissing;
  }
  if (created != 0 || context.asks) {
    run.resolve();  // inserts or growth may have moved rows
  }
  return created;
}

std::size_t Shard::create_all(SlotState& slot, std::span<const std::uint64_t> hashes,
                              InsertContext& context) const {
  context.rows.resize(hashes.size());
  slot.table.find(hashes, context.rows);
  const auto missing =
      static_cast<std::size_t>(std::count(context.rows.begin(), context.rows.end(), nullptr));
  slot.fills = missing > hashes.size() / kFewMissing;
  slot.table.make_room(missing);
  return insert_missing(slot, hashes, context.rows, context.now.clock);
}

}  // namespace shoal
