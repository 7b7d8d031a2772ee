// Endpoint and its followers in Python: orders, messages, assignments, metrics and saves.
//
// Over 600 lines: the bindings of one class.

#include "endpoint/endpoint.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/mix.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"

namespace shoal::bind {

namespace {

// [(first, end), ...]
using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

std::vector<SlotRange> slot_ranges(const Ranges& ranges) {
  std::vector<SlotRange> result;
  for (const auto& [first, end] : ranges) {
    result.push_back({first, end});
  }
  return result;
}

std::unique_ptr<Endpoint> make_endpoint(std::size_t slots, const Ranges& arcs, std::size_t deferred_reads,
                                        std::size_t deferred_bytes, std::size_t pending_bytes,
                                        std::size_t reply_bytes, std::size_t key_list_bytes,
                                        std::shared_ptr<TierSpace> tier) {
  const ServiceLimits limits{.deferred_reads = deferred_reads,
                             .deferred_bytes = deferred_bytes,
                             .pending_bytes = pending_bytes,
                             .reply_bytes = reply_bytes,
                             .key_list_bytes = key_list_bytes,
                             .tier = std::move(tier)};
  return std::make_unique<Endpoint>(Slots(slots), slot_ranges(arcs), limits);
}

// The follower of a stream whose primary has died, as a face for orders: they take effect in the given arcs
// only, and are kept as the last records of these arcs, so that their other copies execute them too
// (Follower::act_on). Without arcs they take effect in all arcs of the follower, and are not kept.
struct FollowerOrders {
  Endpoint& endpoint;
  StreamId stream;
  std::vector<SlotRange> arcs;
};

ArcResult apply(Endpoint& self, const Order& order) { return self.apply(order); }
ArcResult apply(const FollowerOrders& self, const Order& order) {
  return self.endpoint.apply_to_follower(self.stream, self.arcs, order);
}

std::vector<std::uint32_t> tables_of(const Endpoint& self) { return self.tables(); }
std::vector<std::uint32_t> tables_of(const FollowerOrders& self) {
  return self.endpoint.with_follower(self.stream, [](const ArcGroup& arcs) {
    std::vector<std::uint32_t> ids;
    for (const auto& [id, spec] : arcs.tables()) {
      ids.push_back(id);
    }
    return ids;
  });
}

std::unique_ptr<Shard> snapshot_of(const Endpoint& self, std::uint32_t id) { return self.snapshot(id); }
std::unique_ptr<Shard> snapshot_of(const FollowerOrders& self, std::uint32_t id) {
  return self.endpoint.with_follower(self.stream, [&](const ArcGroup& arcs) { return arcs.snapshot(id); });
}

using Pieces = std::vector<std::vector<std::byte>>;
Pieces pieces_of(const Endpoint& self, const SlotRange& range) { return self.save_arc(range); }
Pieces pieces_of(const FollowerOrders& self, const SlotRange& range) {
  return self.endpoint.with_follower(self.stream,
                                     [&](const ArcGroup& arcs) { return arcs.find(range).save(); });
}

py::bytes as_bytes(const void* data, std::size_t size) { return {static_cast<const char*>(data), size}; }

// The whole state of an arc; equal arcs have equal bytes.
template <class Face>
py::list save_arc(const Face& self, std::size_t first, std::size_t end) {
  Pieces pieces;
  {
    const py::gil_scoped_release nogil;
    pieces = pieces_of(self, {first, end});
  }
  py::list result;
  for (const auto& piece : pieces) {
    result.append(as_bytes(piece.data(), piece.size()));
  }
  return result;
}

// --- orders ------------------------------------------------------------------------------------------------

// A field of an order as Python gives it.
template <class Value>
struct FieldValue {
  using Type = Value;
  static const Value& value(const Value& given) { return given; }
  static Value given(const Value& value) { return value; }
};
template <>
struct FieldValue<Mode> {
  using Type = std::string;
  static Mode value(const std::string& mode) {
    SHOAL_CHECK(mode == "bsp" || mode == "ssp" || mode == "asp", "no mode " + mode + ": bsp, ssp or asp");
    return mode == "bsp" ? Mode::kBsp : (mode == "ssp" ? Mode::kSsp : Mode::kAsp);
  }
  static std::string given(Mode mode) {
    return mode == Mode::kBsp ? "bsp" : (mode == Mode::kSsp ? "ssp" : "asp");
  }
};

// What an order answers in Python.
template <class One>
auto result_of_order(const ArcResult& result) {
  if constexpr (std::is_same_v<One, Fence>) {
    return std::pair(result.last.clock, result.last.tables);
  } else if constexpr (std::is_same_v<One, Hold> || std::is_same_v<One, Dismiss>) {
    return result.clock;
  }
}

// The argument of a method for the n-th field of an order; from number `required` on, the value of an empty
// order is the default.
template <class One, std::size_t kRequired, std::size_t n>
auto argument() {
  constexpr auto field = std::get<n>(One::fields());
  if constexpr (n < kRequired) {
    return py::arg(field.name);
  } else {
    using Value = std::decay_t<decltype(One{}.*field.member)>;
    return py::arg(field.name) = FieldValue<Value>::given(One{}.*field.member);
  }
}

// A method with the name and the fields of an order.
template <class One, std::size_t kRequired, class Face>
void add_order(py::class_<Face>& face) {
  const auto add = [&]<class... Value, std::size_t... n>(const std::tuple<Field<One, Value>...>&,
                                                         std::index_sequence<n...>) {
    face.def(
        One::kName.data(),
        [](Face& self, const typename FieldValue<Value>::Type&... given) {
          return result_of_order<One>(apply(self, One{FieldValue<Value>::value(given)...}));
        },
        argument<One, kRequired, n>()..., py::call_guard<py::gil_scoped_release>());
  };
  constexpr auto fields = One::fields();
  add(fields, std::make_index_sequence<std::tuple_size_v<decltype(fields)>>());
}

// The scheduler's orders, which an endpoint and its followers take alike.
template <class Face>
void add_orders(py::class_<Face>& face) {
  using Nogil = py::call_guard<py::gil_scoped_release>;
  add_order<StartJob, 2>(face);
  add_order<EndJob, 1>(face);
  add_order<Admit, 3>(face);
  add_order<Fence, 2>(face);
  add_order<Dismiss, 2>(face);
  add_order<Hold, 0>(face);
  add_order<Resume, 0>(face);
  add_order<SetMemory, 1>(face);
  add_order<DropTable, 1>(face);
  add_order<AddTable, 2>(face);
  face.def("save_arc", &save_arc<Face>, py::arg("first"), py::arg("end"))
      .def("tables", [](const Face& self) { return tables_of(self); }, Nogil());
}

// --- messages ----------------------------------------------------------------------------------------------

// [(peer, [header, frames...])]
py::list as_list(ReplyQueue& out) {
  py::list replies;
  for (const Reply& reply : out.replies()) {
    py::list frames;
    frames.append(as_bytes(reply.header.data(), reply.header.size()));
    for (std::size_t i = 0; i < reply.frames; ++i) {
      frames.append(as_bytes(reply.payload[i].data(), reply.payload[i].size()));
    }
    replies.append(py::make_tuple(as_bytes(reply.peer.data(), reply.peer.size()), std::move(frames)));
  }
  return replies;
}

// What `act` queues.
template <class Act>
py::list replies_of(const Act& act) {
  BufferPool pool;
  ReplyQueue out(pool);
  {
    const py::gil_scoped_release nogil;
    act(out);
  }
  return as_list(out);
}

// Calls use(frames) with the bytes of a message.
template <class Use>
py::list with_frames(const py::sequence& message, const Use& use) {
  std::vector<BufferView> borrowed;
  std::vector<wire::Frame> frames;
  for (const py::handle frame : message) {
    frames.push_back(borrowed.emplace_back(frame).bytes());
  }
  return replies_of([&](ReplyQueue& out) { use(frames, out); });
}

py::list handle(Endpoint& endpoint, const py::bytes& peer, const py::sequence& message) {
  const std::string name = peer;
  return with_frames(message, [&](std::span<const wire::Frame> frames, ReplyQueue& out) {
    endpoint.handle(name, frames, out);
  });
}

py::list handle_backup(Endpoint& endpoint, StreamId stream, const py::sequence& message) {
  return with_frames(message, [&](std::span<const wire::Frame> frames, ReplyQueue& out) {
    endpoint.handle_backup(stream, frames, out);
  });
}

// [header, frames...], or None
py::object next_message(Endpoint& endpoint, StreamId stream) {
  StreamMessage message;
  if (!endpoint.next_message(stream, message)) {
    return py::none();
  }
  py::list frames;
  frames.append(as_bytes(message.header.data(), message.header.size()));
  for (std::size_t i = 0; i < message.count; ++i) {
    const wire::Frame bytes = message.frames.at(i).bytes;
    frames.append(as_bytes(bytes.data(), bytes.size()));
  }
  return frames;
}

// --- assignments -------------------------------------------------------------------------------------------

// (stream, address, server key, in sync, arriving), (stream, in sync)
using Outgoing = std::tuple<StreamId, std::string, std::string, Ranges, Ranges>;
using Incoming = std::tuple<StreamId, Ranges>;

void assign_rows(Endpoint& endpoint, std::uint32_t epoch, const Ranges& primary,
                 const std::vector<Outgoing>& outgoing, const std::vector<Incoming>& incoming,
                 std::uint64_t copy_rate) {
  Assignment assignment{.epoch = epoch, .primary = slot_ranges(primary), .copy_rate = copy_rate};
  for (const auto& [stream, address, key, in_sync, arriving] : outgoing) {
    assignment.outgoing.push_back({.stream = stream,
                                   .address = address,
                                   .server_key = key,
                                   .in_sync = slot_ranges(in_sync),
                                   .arriving = slot_ranges(arriving)});
  }
  for (const auto& [stream, in_sync] : incoming) {
    assignment.incoming.push_back({.stream = stream, .in_sync = slot_ranges(in_sync)});
  }
  const py::gil_scoped_release nogil;
  endpoint.assign(assignment);
}

py::list as_list(const std::vector<SlotRange>& ranges) {
  py::list result;
  for (const SlotRange& range : ranges) {
    result.append(py::make_tuple(range.first, range.end));
  }
  return result;
}

py::object as_dict(const std::optional<Follower::Arriving>& arriving) {
  if (!arriving) {
    return py::none();
  }
  py::dict entry;
  entry["first"] = arriving->range.first;
  entry["end"] = arriving->range.end;
  entry["bytes"] = arriving->bytes;
  entry["total"] = arriving->total;
  return entry;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

// The result of a function, during which other Python threads run.
template <class Function>
auto without_gil(Function&& function) {
  const py::gil_scoped_release nogil;
  return function();
}

// What ask(service) returns. Nothing: the endpoint has been executing a request for so many seconds.
template <class Ask>
auto asked(const Endpoint& endpoint, double patience, const Ask& ask) {
  return without_gil([&] { return endpoint.within(milliseconds(patience), ask); });
}

py::object replication(const Endpoint& endpoint, std::optional<double> patience) {
  const std::optional<ReplicationStatus> found = without_gil([&] {
    return patience ? endpoint.replication(milliseconds(*patience)) : std::optional(endpoint.replication());
  });
  if (!found) {
    return py::none();
  }
  const ReplicationStatus& now = *found;
  py::list streams;
  for (const auto& stream : now.streams) {
    py::dict entry;
    entry["stream"] = stream.stream;
    entry["sent"] = stream.sent;
    entry["acknowledged"] = stream.acknowledged;
    entry["bytes"] = stream.bytes;
    entry["silent"] = stream.silent;
    entry["in_sync"] = as_list(stream.in_sync);
    entry["arriving"] = as_dict(stream.arriving);
    entry["arrived"] = as_list(stream.arrived);
    entry["fenced"] = stream.fenced;
    entry["fault"] = stream.fault;
    streams.append(entry);
  }
  py::list replicas;
  for (const auto& replica : now.replicas) {
    py::dict entry;
    entry["stream"] = replica.stream;
    entry["position"] = replica.position;
    entry["in_sync"] = as_list(replica.in_sync);
    entry["arriving"] = as_dict(replica.arriving);
    entry["fault"] = replica.fault;
    replicas.append(entry);
  }
  py::dict result;
  result["position"] = now.position;
  result["held"] = now.held;
  result["streams"] = streams;
  result["replicas"] = replicas;
  return result;
}

py::list targets(const Endpoint& endpoint) {
  py::list result;
  for (const StreamTarget& target : endpoint.targets()) {
    result.append(py::make_tuple(target.stream, target.address, target.server_key));
  }
  return result;
}

// --- figures -----------------------------------------------------------------------------------------------

template <class Name, std::size_t n>
py::dict counted(const std::array<std::uint64_t, n>& counts) {
  py::dict result;
  for (std::size_t i = 0; i < n; ++i) {
    if (counts[i] != 0) {
      result[py::str(std::string(wire::name(static_cast<Name>(i))))] = counts[i];
    }
  }
  return result;
}

// {least number of the bucket: count}
py::dict histogram(const Histogram& counts) {
  py::dict result;
  for (std::size_t b = 0; b < Histogram::kBuckets; ++b) {
    if (counts.count(b) != 0) {
      result[py::int_(Histogram::lower_bound(b))] = counts.count(b);
    }
  }
  return result;
}

py::object arc_loads(const Endpoint& endpoint, double patience) {
  const auto loads = asked(endpoint, patience, [](const Service& of) { return of.arc_loads(); });
  if (!loads) {
    return py::none();
  }
  py::list result;
  for (const auto& load : *loads) {
    result.append(py::make_tuple(load.range.first, load.range.end, load.rows, load.bytes, load.touched));
  }
  return result;
}

// [(first slot of an arc, table, {name: number})]; of a tier with "tier_" before its names.
py::object table_loads(const Endpoint& endpoint, double patience) {
  const auto loads = asked(endpoint, patience, [](const Service& of) { return of.table_loads(); });
  if (!loads) {
    return py::none();
  }
  py::list result;
  for (const auto& [first_slot, table, load, tier] : *loads) {
    py::dict entry = dict_of(kShardStatistics, load);
    if (tier) {
      add_to(entry, kTierStatistics, *tier, "tier_");
    }
    result.append(py::make_tuple(first_slot, table, entry));
  }
  return result;
}

// The names of statistics, "counter" or "gauge" if servers report them, and what they mean.
template <class Table>
py::tuple described(const Table& table) {
  py::list result;
  for (const auto& statistic : table) {
    const char* const kind = statistic.reported == Reported::kCounter ? "counter"
                             : statistic.reported == Reported::kGauge ? "gauge"
                                                                      : "";
    result.append(py::make_tuple(statistic.name, kind, statistic.help));
  }
  return py::tuple(result);
}

py::object hot_keys(const Endpoint& endpoint, std::size_t most, double patience) {
  const auto found = asked(endpoint, patience, [&](const Service& of) { return of.hot_keys(most); });
  if (!found) {
    return py::none();
  }
  py::list keys;
  for (const HotKey& entry : found->first) {
    keys.append(py::make_tuple(entry.table, unmix(entry.hash), entry.count));
  }
  return py::make_tuple(keys, found->second);
}

// int64[n, dim]; without rows if it does not serve them all; None while it executes a request.
py::object peek_frames(const Endpoint& endpoint, std::uint32_t table, const Array<std::uint64_t>& keys,
                       double patience) {
  std::vector<std::uint64_t> hashes;
  std::ranges::transform(in(keys), std::back_inserter(hashes), [](std::uint64_t key) { return mix(key); });
  const auto found = asked(endpoint, patience, [&](const Service& of) { return of.peek(table, hashes); });
  if (!found) {
    return py::none();
  }
  const std::size_t rows = found->empty() ? 0 : hashes.size();
  Array<std::int64_t> numbers = fresh<std::int64_t>(rows, rows == 0 ? 0 : found->size() / rows);
  std::ranges::copy(*found, numbers.mutable_data());
  return numbers;
}

py::object endpoint_metrics(const Endpoint& endpoint, std::optional<double> patience) {
  const std::optional<ServiceMetrics> found =
      patience ? asked(endpoint, *patience, [](const Service& of) { return of.metrics(); })
               : without_gil([&] { return std::optional(endpoint.metrics()); });
  if (!found) {
    return py::none();
  }
  const ServiceMetrics& now = *found;
  py::dict clocks;
  for (const auto& [rank, clock] : now.clocks) {
    clocks[py::int_(rank)] = clock;
  }
  py::dict result = dict_of(kServiceStatistics, now);
  result["requests"] = counted<wire::Op>(now.requests);
  result["statuses"] = counted<wire::Status>(now.statuses);
  result["narrowed"] = now.narrowed.values;
  result["narrowed_squared_error"] = now.narrowed.squared;
  result["narrowed_largest_error"] = now.narrowed.largest;
  result["applied"] = now.applied;
  result["floor"] = now.floor;
  result["clocks"] = clocks;
  py::dict jobs;
  for (const auto& job : now.jobs) {
    py::dict worker_clocks;
    for (const auto& [rank, clock] : job.clocks) {
      worker_clocks[py::int_(rank)] = clock;
    }
    py::dict entry;
    entry["applied"] = job.applied;
    entry["floor"] = job.floor;
    entry["clocks"] = worker_clocks;
    jobs[py::int_(job.number)] = entry;
  }
  result["jobs"] = jobs;
  result["pull_staleness"] = histogram(now.pull_staleness);
  result["push_staleness"] = histogram(now.push_staleness);
  return result;
}

// A copy of a table's rows, with the endpoint's threads (why not keep_alive: bind/shard.cc).
template <class Face>
py::object shard(const py::object& self, std::uint32_t id) {
  auto& face = self.cast<Face&>();
  std::unique_ptr<Shard> copy;
  {
    const py::gil_scoped_release nogil;
    copy = snapshot_of(face, id);
  }
  py::object held = py::cast(std::move(copy));
  py::detail::keep_alive_impl(held, self);
  return held;
}

// --- saves -------------------------------------------------------------------------------------------------

// Waits without the GIL for the next session, for at most `seconds`; None if there is none, or after
// close_sessions(). Its memory belongs to the endpoint.
py::object next_session(const py::object& self, std::optional<double> seconds) {
  auto& endpoint = self.cast<Endpoint&>();
  std::shared_ptr<CheckpointSession> save;
  {
    const py::gil_scoped_release nogil;
    save = endpoint.next_session(seconds ? std::optional(milliseconds(*seconds)) : std::nullopt);
  }
  if (save == nullptr) {
    return py::none();
  }
  py::object held = py::cast(std::move(save));
  py::detail::keep_alive_impl(held, self);
  return held;
}

py::list summaries(const CheckpointSession& save) {
  py::list result;
  for (std::size_t t = 0; t < save.tables(); ++t) {
    const auto of_table =
        save.summaries().subspan(t * CheckpointSession::kSummaryWords, CheckpointSession::kSummaryWords);
    result.append(py::make_tuple(of_table[0], of_table[1], of_table[2], of_table[3]));
  }
  return result;
}

// (times, text)
py::tuple wait_request(const CheckpointSession& save, std::uint64_t times, double seconds) {
  CheckpointSession::Request request;
  {
    const py::gil_scoped_release nogil;
    request = save.wait_request(times, milliseconds(seconds));
  }
  return py::make_tuple(request.times, py::bytes(request.text));
}

Snapshot::Piece take_slot(CheckpointSession& save, std::size_t table, std::size_t slot) {
  const py::gil_scoped_release nogil;
  return save.take(table, Slot{static_cast<std::uint32_t>(slot)});
}

std::size_t restore_slot(CheckpointSession& save, std::size_t table, std::size_t rows,
                         const Array<std::uint8_t>& section) {
  const auto bytes = std::as_bytes(in(section));
  const py::gil_scoped_release nogil;
  return save.restore(table, rows, bytes);
}

void restore_filter_of(CheckpointSession& save, std::size_t table, std::size_t cut, std::size_t slot,
                       const Array<std::uint8_t>& filter) {
  const auto bytes = std::as_bytes(in(filter));
  const py::gil_scoped_release nogil;
  save.restore_filter(table, Slots(cut), Slot{static_cast<std::uint32_t>(slot)}, bytes);
}

}  // namespace

void add_endpoint(py::module_& module) {
  py::dict statistics;
  statistics["service"] = described(kServiceStatistics);
  statistics["shard"] = described(kShardStatistics);
  statistics["tier"] = described(kTierStatistics);
  module.attr("STATISTICS") = statistics;
  using Nogil = py::call_guard<py::gil_scoped_release>;
  const ServiceLimits limits;
  py::class_<Endpoint> endpoint(module, "Endpoint");
  endpoint
      .def(py::init(&make_endpoint), py::arg("slots"), py::arg("arcs") = Ranges(), py::kw_only(),
           py::arg("deferred_reads") = limits.deferred_reads,
           py::arg("deferred_bytes") = limits.deferred_bytes, py::arg("pending_bytes") = limits.pending_bytes,
           py::arg("reply_bytes") = limits.reply_bytes, py::arg("key_list_bytes") = limits.key_list_bytes,
           py::arg("tier") = py::none())
      .def(
          "set_map",
          [](Endpoint& self, std::uint32_t epoch, const Ranges& arcs) {
            self.set_map(epoch, slot_ranges(arcs));
          },
          py::arg("epoch"), py::arg("arcs"), Nogil())
      .def("shard", &shard<Endpoint>, py::arg("id"))
      .def("next_session", &next_session, py::arg("seconds") = std::nullopt)
      .def("close_sessions", &Endpoint::close_sessions, Nogil())
      .def("assign", &assign_rows, py::arg("epoch"), py::arg("primary"), py::arg("outgoing") = py::list(),
           py::arg("incoming") = py::list(), py::arg("copy_rate") = 0)
      .def("position", &Endpoint::position, Nogil())
      .def("committed", &Endpoint::committed, py::arg("position"), Nogil())
      .def("retired", &Endpoint::retired, Nogil())
      .def("replication", &replication, py::arg("patience") = std::nullopt)
      .def(
          "replica",
          [](Endpoint& self, StreamId stream, const Ranges& arcs) {
            self.with_follower(stream, [](const ArcGroup& /*checked*/) {});
            return FollowerOrders{self, stream, slot_ranges(arcs)};
          },
          py::arg("stream"), py::arg("arcs") = Ranges(), py::keep_alive<0, 1>())
      .def(
          "close_incoming",
          [](Endpoint& self, const std::vector<StreamId>& streams) { self.close_incoming(streams); },
          py::arg("streams"), Nogil())
      .def("stamps", &Endpoint::stamps, Nogil())
      .def("handle", &handle, py::arg("peer"), py::arg("frames"))
      .def("released",
           [](Endpoint& self) { return replies_of([&](ReplyQueue& out) { self.released(out); }); })
      .def("acknowledge",
           [](Endpoint& self) { return replies_of([&](ReplyQueue& out) { self.acknowledge(out); }); })
      .def("targets", &targets)
      .def("next_message", &next_message, py::arg("stream"))
      .def("handle_backup", &handle_backup, py::arg("stream"), py::arg("frames"))
      .def("reconnected", &Endpoint::reconnected, py::arg("stream"))
      .def(
          "on_time",
          [](Endpoint& self, Milliseconds now_ms) {
            return replies_of([&](ReplyQueue& out) { self.on_time(now_ms, out); });
          },
          py::arg("now_ms"))
      .def("next_time", &Endpoint::next_time)
      .def("use_idle_time", &Endpoint::use_idle_time, Nogil())
      .def("metrics", &endpoint_metrics, py::arg("patience") = py::none())
      .def("arc_loads", &arc_loads, py::arg("patience"))
      .def("table_loads", &table_loads, py::arg("patience"))
      .def("hot_keys", &hot_keys, py::arg("most"), py::arg("patience"))
      .def("peek", &peek_frames, py::arg("table"), py::arg("keys").noconvert(), py::arg("patience"));
  add_orders(endpoint);
  py::class_<FollowerOrders> replica(module, "Replica");
  replica.def("shard", &shard<FollowerOrders>, py::arg("id"));
  add_orders(replica);
  py::class_<CheckpointSession, std::shared_ptr<CheckpointSession>>(module, "CheckpointSession")
      .def_property_readonly("slots", &CheckpointSession::slots)
      .def_property_readonly("summaries", &summaries)
      .def_property_readonly("ended", &CheckpointSession::ended)
      .def_property_readonly("call",  // (worker, incarnation, sequence)
                             [](const CheckpointSession& save) {
                               const auto& name = save.name();
                               return py::make_tuple(name.rank, name.incarnation, name.sequence);
                             })
      .def("wait_request", &wait_request, py::arg("times") = 0, py::arg("seconds") = 0.0)
      .def("set_status", &CheckpointSession::set_status, py::arg("text"), Nogil())
      .def(
          "section",
          [](CheckpointSession& save, std::size_t table, std::size_t slot) {
            return section_of(take_slot(save, table, slot));
          },
          py::arg("table"), py::arg("slot"))
      .def(
          "changes",
          [](CheckpointSession& save, std::size_t table, std::size_t slot) {
            return changes_of(take_slot(save, table, slot));
          },
          py::arg("table"), py::arg("slot"))
      .def("restore", &restore_slot, py::arg("table"), py::arg("rows"), py::arg("section").noconvert())
      .def("restore_filter", &restore_filter_of, py::arg("table"), py::arg("cut"), py::arg("slot"),
           py::arg("filter").noconvert())
      .def("cancel", &CheckpointSession::cancel, Nogil());
}

}  // namespace shoal::bind
