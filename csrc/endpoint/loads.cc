// LOAD_*: a worker fills new shards, which replace the tables' shards at its end.

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "endpoint/writes.h"

namespace shoal {

using wire::Op;
using wire::Status;

namespace {

constexpr std::size_t kMaxBytes = std::size_t{1} << 46U;  // of rows; more than any machine has

Refusal not_loading() { return bad_request("no load of this worker is under way: begin one first"); }

void mark(ServiceState& state, const RequestContext& request) {
  for (const auto& arc : state.arcs.arcs()) {
    arc->apply(MarkOp{.write = request.write()});
  }
}

Outcome begin(ServiceState& state, RequestContext& request, const ServedTable& table) {
  const auto rows = request.numbers;
  if (rows.size() != state.slots.count()) {
    return bad_request("a load names the rows of " + std::to_string(state.slots.count()) + " slots, got " +
                       std::to_string(rows.size()) + " numbers");
  }
  std::vector<std::size_t> rows_here(state.slots.count(), 0);
  std::size_t rows_left = kMaxBytes / (table.rows.bytes() + sizeof(std::uint64_t));
  for (const ArcGroup::Served& served : state.arcs.served()) {
    for (std::size_t s = served.first; s < served.end; ++s) {
      if (rows[s] > rows_left) {
        return bad_request("no machine has memory for " + std::to_string(rows[s]) + " rows in slot " +
                           std::to_string(s));
      }
      rows_left -= rows[s];
      rows_here[s] = rows[s];
    }
  }
  std::vector<std::shared_ptr<Shard>> shards;
  for (const auto& arc : state.arcs.arcs()) {
    shards.push_back(arc->shard_maker()(table.spec));
    shards.back()->reserve(state.slots, rows_here);
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    state.arcs.arcs()[i]->apply(LoadBeginOp{.write = request.write(), .shard = std::move(shards[i])});
  }
  return Answer{};
}

Outcome add_rows(ServiceState& state, RequestContext& request) {
  if (!is_loading(state, request, request.header.table)) {
    return not_loading();
  }
  // The hashes come first in a section; restore() checks that they ascend.
  const std::size_t rows =
      std::min<std::size_t>(request.header.count, request.bytes.size() / sizeof(std::uint64_t));
  const std::span hashes(reinterpret_cast<const std::uint64_t*>(request.bytes.data()), rows);
  std::vector<bool> present(state.slots.count());
  for (const std::uint64_t hash : hashes) {
    present[index_of(state.slots.of(hash))] = true;
  }
  state.cut.refused.clear();
  for (std::size_t s = 0; s < state.slots.count(); ++s) {
    if (present[s] && !state.arcs.serves(s)) {
      state.cut.refused.push_back(static_cast<std::uint16_t>(s));
    }
  }
  if (!state.cut.refused.empty()) {
    return done(refused_slots(state.cut, request.out));
  }
  for (const auto& arc : state.arcs.arcs()) {
    const auto first = present.begin() + static_cast<std::ptrdiff_t>(arc->first_slot());
    const auto end = present.begin() + static_cast<std::ptrdiff_t>(arc->end_slot());
    // The first arc checks a section without rows.
    if (std::find(first, end, true) != end || (rows == 0 && arc == state.arcs.arcs().front())) {
      arc->apply(
          LoadRowsOp{.write = request.write(), .rows = request.header.count, .section = request.bytes});
    }
  }
  mark(state, request);
  return Answer{};
}

Outcome add_filter(ServiceState& state, RequestContext& request) {
  if (!is_loading(state, request, request.header.table)) {
    return not_loading();
  }
  const wire::Header& header = request.header;
  const Slots cut(header.count);
  if (cut.bits() < state.slots.bits() || header.aux >= cut.count()) {
    return bad_request("there is no slot " + std::to_string(header.aux) + " of " +
                       std::to_string(cut.count()) + " in one of " + std::to_string(state.slots.count()));
  }
  const std::size_t slot = header.aux >> (cut.bits() - state.slots.bits());
  state.cut.refused.clear();
  if (!state.arcs.serves(slot)) {
    state.cut.refused.push_back(static_cast<std::uint16_t>(slot));
    return done(refused_slots(state.cut, request.out));
  }
  state.arcs.arc_of(slot)->apply(
      LoadFilterOp{.write = request.write(), .cut = cut, .slot = Slot{header.aux}, .filter = request.bytes});
  mark(state, request);
  return Answer{};
}

Outcome end_load(ServiceState& state, RequestContext& request) {
  const auto numbers = request.numbers;
  if (numbers.size() != 1 && numbers.size() != 2 && numbers.size() != 2 + wire::kBaseWords) {
    return bad_request("a load ends with the table's step, clock and base, got " +
                       std::to_string(numbers.size()) + " numbers");
  }
  if (!is_loading(state, request, request.header.table)) {
    return not_loading();
  }
  const LoadEndOp op{.write = request.write(),
                     .step = numbers[0],
                     .table_clock = numbers.size() > 1 ? static_cast<std::uint32_t>(numbers[1]) : 0,
                     .base = numbers.size() > 2 ? wire::base_name(numbers.subspan(2)) : std::string()};
  for (const auto& arc : state.arcs.arcs()) {
    arc->apply(op);
  }
  return Answer{};
}

}  // namespace

bool is_loading(const ServiceState& state, const RequestContext& request, std::uint32_t id) noexcept {
  return std::ranges::all_of(state.arcs.arcs(), [&](const auto& arc) {
    const Arc::Table& table = *arc->find(id);
    return (table.loading != nullptr && table.loader == request.worker()) ||
           arc->jobs().has_done(request.worker(), request.header.sequence);
  });
}

Outcome load(ServiceState& state, RequestContext& request, ServedTable& table) {
  if (state.arcs.has_done(request.write())) {
    ++state.metrics.duplicates;
    return Answer{};
  }
  switch (request.header.op) {
    case Op::kLoadBegin:
      return begin(state, request, table);
    case Op::kLoadRows:
      return add_rows(state, request);
    case Op::kLoadFilter:
      return add_filter(state, request);
    default:
      return end_load(state, request);
  }
}

}  // namespace shoal
