// Orders of the scheduler as values, so that the copies of an arc execute what its primary has executed. Each
// order lists its fields once: encode(), decode_order() and the Python methods of the same names follow from
// the list.
//
//   u8 number in Order | its fields; a table's description as in shard/spec_bytes.h
//
// An order that concerns a job names it; 0 means the default job to who gives an order, and its number is
// what is executed and logged. Executing an order again has no effect: a primary may have died after its
// copies executed it and before the scheduler heard of it.
//
// Threads: values.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "replica/slot_range.h"
#include "replica/worker_id.h"
#include "shard/shard.h"

namespace shoal {

template <class Order, class Value>
struct Field {
  const char* name;
  Value Order::* member;
};
template <class Order, class Value>
Field(const char*, Value Order::*) -> Field<Order, Value>;

// Starts a job without admitted workers, at clock 0. Tables stay. The default job replaces the last one,
// whose pending work is dropped, and the tables' clocks continue from the clock `before` that it reached. A
// named job begins in addition to the others. No effect where the job has already started.
struct StartJob {
  static constexpr std::string_view kName = "start_job";
  std::uint32_t job = kDefaultJob;
  Mode mode = Mode::kBsp;
  std::uint32_t staleness = 0;
  bool mean = false;
  std::uint32_t before = 0;
  bool is_named = false;

  static constexpr auto fields() {
    return std::tuple(Field{"job", &StartJob::job}, Field{"mode", &StartJob::mode},
                      Field{"staleness", &StartJob::staleness}, Field{"mean", &StartJob::mean},
                      Field{"before", &StartJob::before}, Field{"is_named", &StartJob::is_named});
  }
};
// Ends a named job: pending work is dropped, and its number is refused. No effect if there is none.
struct EndJob {
  static constexpr std::string_view kName = "end_job";
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() { return std::tuple(Field{"job", &EndJob::job}); }
};
struct Admit {
  static constexpr std::string_view kName = "admit";
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t clock = 0;
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() {
    return std::tuple(Field{"rank", &Admit::rank}, Field{"incarnation", &Admit::incarnation},
                      Field{"clock", &Admit::clock}, Field{"job", &Admit::job});
  }
};
// Refuses the worker from now on; its last tick here is the result; the others still wait for it. Its last
// clock may have ended at one endpoint and not at another: the scheduler compares the answers of all.
struct Fence {
  static constexpr std::string_view kName = "fence";
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() {
    return std::tuple(Field{"rank", &Fence::rank}, Field{"incarnation", &Fence::incarnation},
                      Field{"job", &Fence::job});
  }
};
// Stops waiting for a worker. Its clocks count up to `clock`, the greatest that any endpoint reported, with
// the tables that its last tick named, as if its ticks had arrived here too: once a tick is accepted
// anywhere, the pushes of its clock are everywhere. The result is the greatest clock that any worker of the
// job has reached here.
struct Dismiss {
  static constexpr std::string_view kName = "dismiss";
  std::uint32_t rank = 0;
  std::uint32_t incarnation = 0;
  std::uint32_t clock = 0;
  std::vector<std::uint32_t> tables{};
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() {
    return std::tuple(Field{"rank", &Dismiss::rank}, Field{"incarnation", &Dismiss::incarnation},
                      Field{"clock", &Dismiss::clock}, Field{"tables", &Dismiss::tables},
                      Field{"job", &Dismiss::job});
  }
};
// Clocks beyond the greatest that a worker has reached do not end until a worker is admitted or RESUME; the
// result is that clock.
struct Hold {
  static constexpr std::string_view kName = "hold";
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() { return std::tuple(Field{"job", &Hold::job}); }
};
struct Resume {
  static constexpr std::string_view kName = "resume";
  std::uint32_t job = kDefaultJob;

  static constexpr auto fields() { return std::tuple(Field{"job", &Resume::job}); }
};
// The tables' memory budget; before the first table is added.
struct SetMemory {
  static constexpr std::string_view kName = "set_memory";
  std::uint64_t slot_bytes = 0;

  static constexpr auto fields() { return std::tuple(Field{"slot_bytes", &SetMemory::slot_bytes}); }
};
// Adds a table where there is none of this number.
struct AddTable {
  static constexpr std::string_view kName = "add_table";
  std::uint32_t id = 0;
  TableSpec spec;

  static constexpr auto fields() {
    return std::tuple(Field{"id", &AddTable::id}, Field{"spec", &AddTable::spec});
  }
};
// No effect if there is no such table.
struct DropTable {
  static constexpr std::string_view kName = "drop_table";
  std::uint32_t id = 0;

  static constexpr auto fields() { return std::tuple(Field{"id", &DropTable::id}); }
};

// --- of a stream ------------------------------------------------------------------------------------------

// Its backup executes nothing more in these arcs, and sets them aside for the stream that lists them next.
struct ReleaseArcs {
  static constexpr std::string_view kName = "release_arcs";
  std::uint32_t epoch = 0;  // of the primary's assignment
  std::vector<SlotRange> arcs{};

  static constexpr auto fields() {
    return std::tuple(Field{"epoch", &ReleaseArcs::epoch}, Field{"arcs", &ReleaseArcs::arcs});
  }
};
// What the backup has of a copy is dropped.
struct AbortCopy {
  static constexpr std::string_view kName = "abort_copy";

  static constexpr auto fields() { return std::tuple(); }
};
// From here on the backup executes in these arcs, which it has set aside.
struct JoinArcs {
  static constexpr std::string_view kName = "join_arcs";
  std::uint32_t epoch = 0;  // of the primary's assignment
  std::vector<SlotRange> arcs{};

  static constexpr auto fields() {
    return std::tuple(Field{"epoch", &JoinArcs::epoch}, Field{"arcs", &JoinArcs::arcs});
  }
};
// A record of a former primary, as a backup has kept it.
struct KeptRecord {
  std::uint64_t stamp = 0;
  std::vector<SlotRange>
      arcs{};  // that have executed it; empty, in a Follower: those that executed all records then
  bool is_request = false;     // or an order
  std::uint32_t end_slot = 0;  // of a request, as in LogRecord
  std::vector<std::vector<std::byte>> frames{};

  static constexpr auto fields() {
    return std::tuple(Field{"stamp", &KeptRecord::stamp}, Field{"arcs", &KeptRecord::arcs},
                      Field{"is_request", &KeptRecord::is_request}, Field{"end_slot", &KeptRecord::end_slot},
                      Field{"frames", &KeptRecord::frames});
  }
  std::size_t bytes() const noexcept;
};
// Before JOIN: these arcs, which are set aside, execute what they lack of the records of former primaries,
// here or in the next orders of this kind. None has more than the new primary's copy of it had.
struct CatchUpArcs {
  static constexpr std::string_view kName = "catch_up_arcs";
  std::uint32_t epoch = 0;
  std::vector<SlotRange> arcs{};
  std::vector<std::uint64_t> stamps{};  // of the new primary's copies
  std::vector<KeptRecord> records{};

  static constexpr auto fields() {
    return std::tuple(Field{"epoch", &CatchUpArcs::epoch}, Field{"arcs", &CatchUpArcs::arcs},
                      Field{"stamps", &CatchUpArcs::stamps}, Field{"records", &CatchUpArcs::records});
  }
};

// Each has a member `job`, and is of one.
template <class One>
concept OfJob = requires(One order) { order.job; };

using Order = std::variant<StartJob, Admit, Fence, Dismiss, Hold, Resume, SetMemory, AddTable, DropTable,
                           ReleaseArcs, AbortCopy, JoinArcs, CatchUpArcs, EndJob>;

// Whether it concerns a stream and its copies of arcs, and is not executed by arcs.
bool is_of_stream(const Order& order) noexcept;

std::vector<std::byte> encode(const Order& order);
// std::invalid_argument for anything that encode() has not made.
Order decode_order(std::span<const std::byte> bytes);

}  // namespace shoal
