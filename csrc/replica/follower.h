// Follower: what an endpoint has as the backup of another one: arcs that execute the records of one stream,
// in the order of their sequence, each once; earlier ones are acknowledged again, later ones are refused as a
// gap. docs/replication.md is the protocol, follower.cc has copies.
//
// Arcs are deterministic, so they stay equal to the primary's. Two checks detect a difference: the status of
// each request, and under BSP the clocks that are applied after a tick. A follower that differs has
// *diverged*: it executes nothing more, and reports the reason.
//
// take_acknowledgement() is one reply for all records since the last one.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "replica/arc_copy.h"
#include "replica/arc_group.h"
#include "replica/orders.h"
#include "replica/replay.h"
#include "wire/record_header.h"

namespace shoal {

// What a follower has kept of arcs that it gives, for their other copies.
struct Handover {
  std::vector<SlotRange> arcs{};
  std::vector<std::uint64_t> stamps{};  // of each
  std::vector<KeptRecord> records{};    // in the order of their stamps

  // The part that concerns these arcs.
  Handover part(std::span<const SlotRange> ranges) const;
};

// What a follower answers its primary.
struct Acknowledgement {
  std::string peer{};  // that sends the stream, as a ROUTER names it
  wire::Status status = wire::Status::kOk;
  std::uint64_t position = 0;  // of the last record that was executed
  std::uint32_t arrived = 0;   // 1 + first slot of the arc whose copy was completed last
  std::string text{};          // of INTERNAL
};

class Follower {
 public:
  // A request of the stream has at most so many bytes. `tier`: that of arcs here (Arc::set_tier).
  Follower(std::uint64_t stream, Slots slots, std::uint64_t request_bytes, std::shared_ptr<TierSpace> tier)
      : stream_(stream),
        slots_(slots),
        request_bytes_(request_bytes),
        tier_(std::move(tier)),
        arcs_(slots, workspace_, disposal_, tier_) {}

  std::uint64_t stream() const noexcept { return stream_; }
  // Those that execute records.
  const ArcGroup& arcs() const noexcept { return arcs_; }
  std::uint64_t position() const noexcept { return position_; }
  // Why it has diverged; "" if it has not.
  const std::string& fault() const noexcept { return fault_; }
  void set_fault(std::string why) { fault_ = std::move(why); }

  // Executes a REPLICATE of this stream, which decode() has checked.
  void handle(std::string_view peer, const wire::Decoded& message) noexcept;
  // The reply to what handle() has received since the last one; nullopt: nothing. Throws std::bad_alloc, and
  // owes it then.
  std::optional<Acknowledgement> acknowledgement() const;
  void acknowledged() noexcept { is_due_ = gap_ = false; }
  // Whether catch_up() has something to do; it executes some of the kept records.
  bool is_behind() const noexcept { return arriving_ && arriving_->arcs != nullptr; }
  void catch_up() noexcept;
  // The arc that is arriving, and how much of it is here.
  struct Arriving {
    SlotRange range;
    std::uint64_t bytes = 0;
    std::uint64_t total = 0;
  };
  std::optional<Arriving> arriving() const;
  // Adds arcs that execute records, with their stamps, to others, and removes them here. As ArcGroup::take().
  void take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to);
  // Likewise, those arcs that are set aside for which wanted(range) is true.
  template <class Wanted>
  void take_aside(const Wanted& wanted, std::vector<std::unique_ptr<Arc>>& to) {
    to.reserve(to.size() + aside_.size());
    for (std::unique_ptr<Arc>& arc : aside_) {
      if (wanted(arc->range())) {
        to.push_back(std::move(arc));
      }
    }
    std::erase(aside_, nullptr);
  }
  // Sets those of the arcs aside that its primary will have, and makes the others of these slots, empty,
  // before the first job. The primary says at which position they join: what it executed before was without
  // them. `handovers` are of the replicas that gave the arcs. What is not needed is added to the arcs, which
  // have room for it. If it throws, no arc has moved.
  void expect(std::vector<std::unique_ptr<Arc>>& arcs, std::span<const SlotRange> in_sync,
              std::uint32_t epoch, std::span<const Handover> handovers);

  // --- when the primary has ended -------------------------------------------------------------------------

  // The slots of all arcs, also those that are set aside, and the stamps of the last records that they have
  // executed.
  std::vector<std::pair<SlotRange, std::uint64_t>> stamps() const;
  // Executes an order in these arcs alone, also where they are set aside, keeps it as their last record, and
  // sets them aside. If it throws they are set aside as well, and nothing is kept. Empty: in all that execute
  // records, and it is not kept.
  ArcResult act_on(std::span<const SlotRange> ranges, const Order& order);
  // What is kept for other copies of all arcs that are here.
  Handover hand_over() const;

 private:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  // Stamps of the records that an arc has executed here.
  struct Interval {
    std::uint64_t first = 0;
    std::uint64_t last = kNever;
  };
  // Records of former primaries, which are kept until all copies of these arcs have joined.
  struct Inherited {
    std::vector<SlotRange> arcs;
    std::vector<KeptRecord> records;
    std::uint64_t until = kNever;  // stamp
  };
  struct Copy {
    SlotRange range;
    std::vector<std::byte> piece;  // the front of one
    ArcRestorer restorer;
    std::uint64_t bytes = 0;
    std::uint64_t total = 0;  // estimated
    std::uint64_t stamp = 0;  // of its beginning
    std::deque<KeptRecord> kept;
    std::size_t added = 0;           // kept since the last turn
    std::unique_ptr<ArcGroup> arcs;  // the restored arc alone; null: pieces are missing
  };

  // False: the record was damaged on its way and has to be sent again.
  bool execute(const wire::RecordHeader& record, const wire::Decoded& message);
  bool replay(const wire::RecordHeader& record, const wire::Decoded& message);
  // False: arcs that it names are not here yet.
  bool execute_order(const Order& order, std::uint64_t stamp);
  // Processes the stamp and the floor of a message whose record was executed.
  void note_stamp(const wire::RecordHeader& record, const wire::Decoded& message);
  bool catch_up(const CatchUpArcs& order, std::uint64_t stamp);
  bool are_here(std::span<const SlotRange> ranges, std::uint32_t epoch) const;
  void join(std::span<const SlotRange> ranges, std::uint64_t stamp);
  // Has them execute records from now on.
  void adopt(std::span<std::unique_ptr<Arc>> arcs);
  // Whether an arc executes records here.
  bool has(const SlotRange& range) const { return arcs_.has(range); }
  bool has_executed(std::size_t first_slot, std::uint64_t stamp) const;
  void begin_interval(std::size_t first_slot, std::uint64_t stamp);
  void end_interval(std::size_t first_slot, std::uint64_t stamp);
  void release(const ReleaseArcs& order, std::uint64_t stamp);
  bool has_aside(const SlotRange& range) const;
  void keep(const wire::RecordHeader& record, const wire::Decoded& message);
  void begin_copy(std::span<const std::byte> head, std::uint64_t stamp);
  void abort_copy(std::uint64_t stamp);
  void add_chunk(std::span<const std::byte> chunk);
  void restore_copy();
  void execute_kept();

  const std::uint64_t stream_;
  const Slots slots_;
  const std::uint64_t request_bytes_;
  std::shared_ptr<TierSpace> tier_;
  ArcWorkspace workspace_;
  Disposal disposal_;
  std::optional<Copy> arriving_;
  std::uint32_t arrived_ = 0;                // 1 + first slot of the range whose copy was completed last
  std::uint64_t arrived_stamp_ = 0;          // of the beginning of this copy
  std::vector<std::unique_ptr<Arc>> aside_;  // arcs that its primary has released, or does not have yet
  std::uint32_t epoch_ = 0;                  // of the last assignment
  std::vector<SlotRange> in_sync_;           // that it lists
  std::uint64_t executed_ = 0;               // stamp of the last record that was executed
  std::uint64_t floor_ = 0;                  // stamp up to which all backups have acknowledged
  std::deque<KeptRecord> kept_;
  std::vector<Inherited> inherited_;
  std::map<std::size_t, std::vector<Interval>> intervals_;  // by first slot
  ArcGroup arcs_;                                           // that execute records
  wire::Decoded decoded_;                                   // scratch
  Cut cut_;
  std::uint64_t position_ = 0;  // sequence of the last record that was executed
  std::string fault_;
  std::string peer_;     // that sends
  bool is_due_ = false;  // a reply
  bool gap_ = false;     // since the last reply
};

}  // namespace shoal
