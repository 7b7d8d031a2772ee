// Orders of the scheduler as values, so that a replica executes what its primary has executed.
//
//   u8 number in Order | its fields; a table's description as in shard/spec_bytes.h
//
// Of a named job, its number follows the fields of an order that concerns a job (u32), and 1 those of its START_JOB (u8). Without, the
// order is of the default job.
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
  bool is_named = false;
};
struct Admit {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t clock = 0;
  std::uint32_t job = kDefaultJob;
};
struct Fence {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t job = kDefaultJob;
};
struct Dismiss {
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  LastTick last{};
  std::uint32_t job = kDefaultJob;
};
struct Hold {
  std::uint32_t job = kDefaultJob;
};
struct Resume {
  std::uint32_t job = kDefaultJob;
};
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
  std::uint32_t epoch = 0;  // of the primary's assignment
  std::vector<SlotRange> arcs{};
};
struct AbortCopy {};
struct JoinArcs {
  std::uint32_t epoch = 0;  // likewise
  std::vector<SlotRange> arcs{};
};
// A record of a former primary, as a backup has kept it.
struct KeptRecord {
  std::uint64_t stamp = 0;
  std::vector<SlotRange>
      arcs{};  // that have executed it; empty, in a Replica: those that executed all records then
  bool is_request = false;     // or an order
  std::uint32_t end_slot = 0;  // of a request, as in LogRecord
  std::vector<std::vector<std::byte>> frames{};

  std::size_t bytes() const noexcept;
};
// CATCH_UP, before JOIN: these arcs, which are set aside, execute what they lack of the records of former primaries, here or in the
// next orders of this kind. None has more than the new primary's copy of it had.
struct CatchUpArcs {
  std::uint32_t epoch = 0;
  std::vector<SlotRange> arcs{};
  std::vector<std::uint64_t> stamps{};  // of the new primary's copies
  std::vector<KeptRecord> records{};
};
// Ends a named job.
struct EndJob {
  std::uint32_t job = 0;
};
using Order = std::variant<StartJob, Admit, Fence, Dismiss, Hold, Resume, SetMemory, AddTable, DropTable,
                           ReleaseArcs, AbortCopy, JoinArcs, CatchUpArcs, EndJob>;

std::vector<std::byte> encode(const Order& order);
// std::invalid_argument for anything that encode() has not made.
Order decode_order(std::span<const std::byte> bytes);
// Not for those of a stream.
void execute(const Order& order, Service& service);
// A request, or an order, as a backup has kept it.
void execute(const KeptRecord& record, Service& service);

}  // namespace shoal
