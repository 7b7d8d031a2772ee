#include "server/orders.h"

#include <string>
#include <type_traits>
#include <utility>

#include "base/byte_stream.h"
#include "base/check.h"
#include "shard/spec_bytes.h"

namespace shoal {

namespace {

constexpr const char* kName = "an order";

template <class Field>
void put(ByteWriter& to, const Field& field) {
  to.put(field);
}
void put(ByteWriter& to, const LastTick& last) {
  to.put(last.clock);
  to.put_array(std::span<const std::uint32_t>(last.tables));
}
void put(ByteWriter& to, const TableSpec& spec) {
  const std::vector<std::byte> bytes = encode(spec);
  to.put(std::uint64_t{bytes.size()});
  to.put_raw(bytes);
}

template <class... Fields>
void put_all(ByteWriter& to, const Fields&... fields) {
  (put(to, fields), ...);
}

struct Write {
  ByteWriter& to;

  void operator()(const StartJob& order) const {
    put_all(to, order.job, static_cast<std::uint8_t>(order.mode), order.staleness,
            static_cast<std::uint8_t>(order.mean), order.before);
    if (order.is_named) {
      to.put(std::uint8_t{1});
    }
  }
  void operator()(const Admit& order) const {
    put_all(to, order.rank, order.incarnation, order.clock);
    put_job(order.job);
  }
  void operator()(const Fence& order) const {
    put_all(to, order.rank, order.incarnation);
    put_job(order.job);
  }
  void operator()(const Dismiss& order) const {
    put_all(to, order.rank, order.incarnation, order.last);
    put_job(order.job);
  }
  void operator()(const Hold& order) const { put_job(order.job); }
  void operator()(const Resume& order) const { put_job(order.job); }
  void operator()(const EndJob& order) const { to.put(order.job); }
  void operator()(const SetMemory& order) const { put_all(to, order.slot_bytes); }
  void operator()(const AddTable& order) const { put_all(to, order.id, order.spec); }
  void operator()(const DropTable& order) const { put_all(to, order.id); }
  void operator()(const ReleaseArcs& order) const {
    to.put(order.epoch);
    put(order.arcs);
  }
  void operator()(const AbortCopy& /*order*/) const {}
  void operator()(const JoinArcs& order) const {
    to.put(order.epoch);
    put(order.arcs);
  }
  void operator()(const CatchUpArcs& order) const {
    to.put(order.epoch);
    put(order.arcs);
    to.put_array<std::uint64_t>(order.stamps);
    to.put(std::uint64_t{order.records.size()});
    for (const KeptRecord& record : order.records) {
      to.put(record.stamp);
      put(record.arcs);
      to.put(static_cast<std::uint8_t>(record.is_request));
      to.put(record.end_slot);
      to.put(std::uint64_t{record.frames.size()});
      for (const auto& frame : record.frames) {
        to.put(std::uint64_t{frame.size()});
        to.put_raw(frame);
      }
    }
  }

  void put_job(std::uint32_t job) const {
    if (job != kDefaultJob) {
      to.put(job);
    }
  }
  void put(std::span<const SlotRange> arcs) const {
    std::vector<std::uint64_t> bounds;
    for (const SlotRange& range : arcs) {
      bounds.insert(bounds.end(), {range.first, range.end});
    }
    to.put_array(std::span<const std::uint64_t>(bounds));
  }
};

}  // namespace

std::size_t KeptRecord::bytes() const noexcept {
  std::size_t sum = 0;
  for (const auto& frame : frames) {
    sum += frame.size();
  }
  return sum;
}

std::vector<std::byte> encode(const Order& order) {
  ByteWriter to;
  to.bytes().reserve(64);
  to.put(static_cast<std::uint8_t>(order.index()));
  std::visit(Write{to}, order);
  return to.take();
}

Order decode_order(std::span<const std::byte> bytes) {
  ByteReader from(bytes, kName);
  const auto number = [&](const char* field) { return from.take<std::uint32_t>(field); };
  const auto job = [&] { return from.left() == 0 ? kDefaultJob : number("the job"); };
  const auto ranges = [&] {
    const auto bounds = from.take_array<std::uint64_t>("the slots");
    std::vector<SlotRange> found;
    for (std::size_t i = 0; i + 1 < bounds.size(); i += 2) {
      found.push_back({static_cast<std::size_t>(bounds[i]), static_cast<std::size_t>(bounds[i + 1])});
    }
    return found;
  };
  const auto kind = from.take<std::uint8_t>("its number");
  Order order;
  switch (kind) {
    case 0: {
      StartJob start;
      start.job = number("the job");
      start.mode = from.take_enum("the mode", Mode::kAsp);
      start.staleness = number("the staleness");
      start.mean = from.take_flag("the mean");
      start.before = number("the clock before");
      start.is_named = from.left() != 0 && from.take_flag("whether it is named");
      order = start;
      break;
    }
    case 1: {
      Admit admit;
      admit.rank = number("the rank");
      admit.incarnation = number("the incarnation");
      admit.clock = number("the clock");
      admit.job = job();
      order = admit;
      break;
    }
    case 2: {
      Fence fence;
      fence.rank = number("the rank");
      fence.incarnation = number("the incarnation");
      fence.job = job();
      order = fence;
      break;
    }
    case 3: {
      Dismiss dismiss;
      dismiss.rank = number("the rank");
      dismiss.incarnation = number("the incarnation");
      dismiss.last.clock = number("the clock");
      dismiss.last.tables = from.take_array<std::uint32_t>("the tables");
      dismiss.job = job();
      order = std::move(dismiss);
      break;
    }
    case 4:
      order = Hold{job()};
      break;
    case 5:
      order = Resume{job()};
      break;
    case 6:
      order = SetMemory{from.take<std::uint64_t>("the bytes of a slot")};
      break;
    case 7: {
      const std::uint32_t id = number("the table");
      const std::size_t size = from.take_count("the description", 1);
      order = AddTable{id, decode_spec(from.take_raw(size, "the description"))};
      break;
    }
    case 8:
      order = DropTable{number("the table")};
      break;
    case 9: {
      const std::uint32_t epoch = number("the epoch");
      order = ReleaseArcs{epoch, ranges()};
      break;
    }
    case 10:
      order = AbortCopy{};
      break;
    case 11: {
      const std::uint32_t epoch = number("the epoch");
      order = JoinArcs{epoch, ranges()};
      break;
    }
    case 12: {
      CatchUpArcs catch_up;
      catch_up.epoch = number("the epoch");
      catch_up.arcs = ranges();
      catch_up.stamps = from.take_array<std::uint64_t>("the stamps");
      SHOAL_CHECK(catch_up.stamps.size() == catch_up.arcs.size(),
                  "an order has another number of stamps than of arcs");
      for (std::size_t left = from.take_count("the records", 1); left != 0; --left) {
        KeptRecord record;
        record.stamp = from.take<std::uint64_t>("the stamp of a record");
        record.arcs = ranges();
        record.is_request = from.take_flag("the kind of a record");
        record.end_slot = number("the end of a record");
        for (std::size_t frames = from.take_count("the frames", 1); frames != 0; --frames) {
          const auto frame = from.take_raw(from.take_count("a frame", 1), "a frame");
          record.frames.emplace_back(frame.begin(), frame.end());
        }
        catch_up.records.push_back(std::move(record));
      }
      order = std::move(catch_up);
      break;
    }
    case 13:
      order = EndJob{number("the job")};
      break;
    default:
      SHOAL_CHECK(false, "there is no order " + std::to_string(kind));
  }
  from.done();
  return order;
}

void execute(const KeptRecord& record, Service& service) {
  if (record.is_request) {
    const std::vector<wire::Frame> frames(record.frames.begin(), record.frames.end());
    service.replay(frames, record.end_slot);
  } else {
    execute(decode_order(record.frames.front()), service);
  }
}

void execute(const Order& order, Service& service) {
  std::visit(
      [&](const auto& one) {
        using One = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<One, StartJob>) {
          service.start_job(one.job, one.mode, one.staleness, one.mean, one.before, one.is_named);
        } else if constexpr (std::is_same_v<One, Admit>) {
          service.admit(one.rank, one.incarnation, one.clock, one.job);
        } else if constexpr (std::is_same_v<One, Fence>) {
          service.fence(one.rank, one.incarnation, one.job);
        } else if constexpr (std::is_same_v<One, Dismiss>) {
          service.dismiss(one.rank, one.incarnation, one.last, one.job);
        } else if constexpr (std::is_same_v<One, Hold>) {
          service.hold(one.job);
        } else if constexpr (std::is_same_v<One, Resume>) {
          service.resume(one.job);
        } else if constexpr (std::is_same_v<One, EndJob>) {
          service.end_job(one.job);
        } else if constexpr (std::is_same_v<One, SetMemory>) {
          service.set_memory(one.slot_bytes);
        } else if constexpr (std::is_same_v<One, AddTable>) {
          service.add_table(one.id, one.spec);
        } else if constexpr (std::is_same_v<One, DropTable>) {
          service.drop_table(one.id);
        } else {
          SHOAL_DCHECK(false);
        }
      },
      order);
}

}  // namespace shoal
