// Orders of the scheduler as values, so that a replica executes what its primary has executed.
//
//   u8 number in Order | its fields; a table's description as in shard/spec_bytes.h
//
// Executing an order again has no effect: a primary may have died after its backup executed it and before the scheduler heard of it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "server/service.h"

namespace shoal {

struct StartJob {
  std::uint32_t job = 0;
  Mode mode = Mode::kBsp;
  std::uint32_t staleness = 0;
  bool mean = false;
  std::uint32_t before = 0;
};
struct Admit {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t clock = 0;
};
struct Fence {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
};
struct Dismiss {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  LastTick last{};
};
struct Hold {};
struct Resume {};
struct SetMemory {
  std::uint64_t slot_bytes = 0;
};
struct AddTable {
  std::uint32_t id = 0;
  TableSpec spec;
};
struct DropTable {
  std::uint32_t id = 0;
};
// These concern the stream that has them. RELEASE: its backup executes nothing more in these arcs, and sets them aside for the stream
// that lists them next. JOIN: from here on it executes in these arcs, which it has set aside. ABORT_COPY: what it has of a copy is
// dropped.
struct ReleaseArcs {
  std::vector<SlotRange> arcs{};
};
struct AbortCopy {};
struct JoinArcs {
  std::vector<SlotRange> arcs{};
};
using Order = std::variant<StartJob, Admit, Fence, Dismiss, Hold, Resume, SetMemory, AddTable, DropTable,
                           ReleaseArcs, AbortCopy, JoinArcs>;

std::vector<std::byte> encode(const Order& order);
// std::invalid_argument for anything that encode() has not made.
Order decode_order(std::span<const std::byte> bytes);
// Not for those of a stream.
void execute(const Order& order, Service& service);

}  // namespace shoal
