// ArcGroup: the arcs of one owner, in the order of their slots: of a data loop, which serves them
// (endpoint/service.h), or of a follower, which executes what their primary has executed
// (replica/follower.h). A message is cut once along the arcs, and each arc executes its operation
// (replica/arc_op.h), in the order of the slots: where one fails, the later ones are not asked, and a
// repetition of the message continues there.
//
// Invariants
//   I1  No slot has two arcs; each arc serves at most one range of slots.
//   I2  Every arc has the tables that are known, or gets them when the order is repeated; likewise its jobs.
//
// Threads: none of its own; one owner. The workspace and the disposal outlive the group.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mix.h"
#include "replica/arc.h"
#include "replica/orders.h"
#include "replica/slot_range.h"
#include "transport/multipart_message.h"
#include "wire/wire.h"

namespace shoal {

// The part of a request in an arc: hashes [begin, begin + count).
struct Slice {
  Arc* arc;
  std::size_t begin;
  std::size_t count;
  Remainder left{};  // of a write
};

// A request, cut along the arcs.
struct Cut {
  std::vector<Slice> slices{};
  std::vector<std::uint16_t> refused{};  // slots that are not served here
  bool any_left = false;                 // of a write, in any slice
  bool is_repeated = false;              // some of it was executed before
};

// The arcs that a write has changed, wholly or in part, in the order of their slots. None: it has changed
// nothing.
using ChangedArcs = std::vector<SlotRange>;

class ArcGroup {
 public:
  static constexpr std::size_t kAllSlots = std::numeric_limits<std::size_t>::max();

  struct Served {
    Arc* arc;
    std::size_t first;
    std::size_t end;
  };

  ArcGroup(Slots slots, ArcWorkspace& workspace, Disposal& disposal, std::shared_ptr<TierSpace> tier)
      : slots_(slots), workspace_(workspace), disposal_(disposal), tier_(std::move(tier)) {}

  // --- arcs that come and go ------------------------------------------------------------------------------

  // Serves the slots of these ranges, which ascend, from now on. A range that has no arc yet gets one, with
  // the tables that there are; this is possible until the first job.
  void serve(const std::vector<SlotRange>& ranges);
  void serve_all() { serve(ranges()); }
  // std::invalid_argument: some arc is not here, or named twice.
  void check_take(std::span<const SlotRange> ranges) const;
  // Adds the arcs of these slots to others, and removes them here. If it throws, no arc has moved; it does
  // not if the arcs are here and `to` has room for them.
  void take(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to);
  // Takes over arcs of slots that have none here, with their tables and jobs: the pointers are null
  // afterwards. Their slots are served from the next serve() on. If it throws, nothing has changed.
  void adopt(std::span<std::unique_ptr<Arc>> arcs);
  // Frees arcs that are no longer needed, in a background thread.
  void discard(std::vector<std::unique_ptr<Arc>> arcs);

  Slots slots() const noexcept { return slots_; }
  const std::vector<std::unique_ptr<Arc>>& arcs() const noexcept { return arcs_; }
  const std::vector<Served>& served() const noexcept { return served_; }
  std::vector<SlotRange> ranges() const;
  bool has(const SlotRange& range) const noexcept;
  bool serves(std::size_t slot) const noexcept;
  // Null: no arc has this slot.
  Arc* arc_of(std::size_t slot) const noexcept;
  // Of exactly these slots. std::invalid_argument: there is none.
  const Arc& find(const SlotRange& range) const;
  // The memory budget of the slots that are served; nullopt: some of them have none.
  std::optional<std::uint64_t> budget_bytes() const noexcept;
  const std::map<std::uint32_t, TableSpec>& tables() const noexcept { return tables_; }
  // Of every arc.
  bool has_table(std::uint32_t id) const noexcept;
  // A copy of a table's current state, for tests. std::invalid_argument: there is no such table.
  std::unique_ptr<Shard> snapshot(std::uint32_t id) const;

  // --- orders ---------------------------------------------------------------------------------------------

  // The numbers of the jobs, that of the default job first; 0: it has not begun.
  const std::vector<std::uint32_t>& jobs() const noexcept { return jobs_; }
  bool has_job(std::uint32_t job) const noexcept;
  bool has_begun() const noexcept { return has_begun_; }
  // The order with the number of its job, where it means the default job.
  Order resolved(Order order) const;
  // Has all arcs execute an order that is not of a stream. The greatest clocks, and the sum of what was
  // dropped.
  ArcResult apply(const Order& order);
  // The arcs that lack a table, by first slot, with what makes a shard for them by any thread.
  // std::invalid_argument: there is another table of this number.
  using ShardMakers =
      std::vector<std::pair<std::size_t, std::function<std::shared_ptr<Shard>(const TableSpec&)>>>;
  ShardMakers lacking(std::uint32_t id, const TableSpec& spec) const;
  // Adds shards by first slot, where the arcs are still here and lack the table. Whether no arc lacks it now.
  bool add_shards(std::uint32_t id, const TableSpec& spec,
                  std::span<const std::pair<std::size_t, std::shared_ptr<Shard>>> shards);

  // --- requests -------------------------------------------------------------------------------------------

  // Of a worker in the arcs: kOk, kFenced or kNotAdmitted. `agree`: they all know the same workers of the
  // job.
  wire::Status admits(const WorkerId& worker, std::uint32_t incarnation, bool agree = false) const noexcept;
  void cut(std::span<const std::uint64_t> hashes, Cut& to) const;
  // Likewise, with what is left of a write in each arc below `end_slot`. A call without keys concerns every
  // arc.
  void cut(const WriteId& write, std::span<const std::uint64_t> hashes, Cut& to,
           std::size_t end_slot = kAllSlots) const;
  // Why a BSP step of the table was not made in an arc of the slices; null if none failed.
  static const StepFailure* failed_step(const Cut& cut, std::uint32_t table) noexcept;

  // Execute a write that was cut. `received`: the message that has its frames, some of which may be taken.
  void push(const WriteId& write, const WriteRows& rows, std::size_t dim, const Cut& cut,
            MultipartMessage* received, ChangedArcs& changed);
  static void assign(const WriteId& write, const WriteRows& rows, std::size_t dim, const Cut& cut,
                     ChangedArcs& changed);
  // The number of rows that the call has erased, however often it came.
  static std::uint64_t erase(const WriteId& write, std::span<const std::uint64_t> hashes, const Cut& cut,
                             ChangedArcs& changed);
  // Execute a call that names no slots, in all arcs below `end_slot`. Of CHANGE and SWEEP the answers; they
  // act once.
  std::vector<double> change(const WriteId& write, Function function, std::span<const double> parameters,
                             ChangedArcs& changed, std::size_t end_slot = kAllSlots);
  std::vector<std::uint64_t> sweep(const WriteId& write, std::span<const Expiry> rules, ChangedArcs& changed,
                                   std::size_t end_slot = kAllSlots);
  void tick(const WorkerId& worker, std::uint32_t clock, std::span<const std::uint32_t> tables,
            ChangedArcs& changed, std::size_t end_slot = kAllSlots);
  void mark(const WriteId& write, ChangedArcs& changed, std::size_t end_slot = kAllSlots);
  // Whether all arcs have executed a call that names no slots.
  bool has_done(const WriteId& write) const noexcept;
  // The least and the greatest clock of an admitted worker.
  std::pair<std::uint32_t, std::uint32_t> clocks_of(const WorkerId& worker) const noexcept;

  // --- clocks of a job ------------------------------------------------------------------------------------

  // Of an arc that has the job; kAsp if none has.
  Mode mode(std::uint32_t job) const noexcept;
  std::uint32_t floor(std::uint32_t job) const noexcept;
  // The least and the greatest of the arcs.
  std::uint32_t applied(std::uint32_t job) const noexcept;
  std::uint32_t last_applied(std::uint32_t job) const noexcept;
  // Whether a read at this clock sees all that it must see, in every arc.
  bool is_complete(std::uint32_t job, std::uint32_t clock) const noexcept;
  // Of pending pushes; of those of the clocks that are merged next.
  std::size_t pending_bytes(std::uint32_t job) const noexcept;
  std::size_t pending_bytes() const noexcept;
  std::size_t next_bytes(std::uint32_t job) const noexcept;
  // The sum of the clocks that these arcs have applied, of all jobs, to compare two copies.
  std::uint32_t applied_sum(std::span<const SlotRange> ranges) const noexcept;
  // Applies, in each arc, the next clock of each job that has ended, unless waits(job). Whether any was
  // applied; a step that failed stays pending, and is counted. Each is made by in_rows(work), which calls
  // work().
  template <class Waits, class InRows>
  bool step(const Waits& waits, std::uint64_t& failures, const InRows& in_rows) noexcept {
    bool moves = false;
    for (const auto& arc : arcs_) {
      for (std::size_t n = 0; n < arc->jobs().all().size(); ++n) {
        const JobState& job = *arc->jobs().all()[n];
        if (job.has_step() && !waits(job)) {
          in_rows([&] { moves = try_step(*arc, n, failures) || moves; });
        }
      }
    }
    return moves;
  }

 private:
  static bool try_step(Arc& arc, std::size_t job, std::uint64_t& failures) noexcept;
  // Calls use(arc) for the arcs below `end_slot`.
  template <class Use>
  void each_below(std::size_t end_slot, const Use& use) const;
  template <class Get>
  std::optional<std::uint32_t> least(std::uint32_t job, const Get& get) const noexcept;
  void sort_arcs() noexcept;

  const Slots slots_;
  ArcWorkspace& workspace_;
  Disposal& disposal_;
  std::shared_ptr<TierSpace> tier_;
  std::vector<std::unique_ptr<Arc>> arcs_;  // in the order of their slots
  std::vector<Served> served_;              // in the order of their slots
  std::map<std::uint32_t, TableSpec> tables_;
  std::optional<std::uint64_t> slot_bytes_;  // the memory budget of arcs that are made here
  std::vector<std::uint32_t> jobs_{kDefaultJob};
  bool has_begun_ = false;  // some job has
};

}  // namespace shoal
