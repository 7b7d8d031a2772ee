#include "server/replicated_service.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"

namespace shoal::bind {

namespace {

// [(first, end), ...]
using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

std::vector<SlotRange> slot_ranges(const Ranges& ranges) {
  std::vector<SlotRange> all;
  for (const auto& [first, end] : ranges) {
    all.push_back({first, end});
  }
  return all;
}

std::unique_ptr<ReplicatedService> make_service(std::size_t slots, const Ranges& arcs,
                                                std::size_t deferred_reads, std::size_t deferred_bytes,
                                                std::size_t pending_bytes, std::size_t reply_bytes,
                                                std::size_t key_list_bytes) {
  const ServiceLimits limits{.deferred_reads = deferred_reads,
                             .deferred_bytes = deferred_bytes,
                             .pending_bytes = pending_bytes,
                             .reply_bytes = reply_bytes,
                             .key_list_bytes = key_list_bytes};
  return std::make_unique<ReplicatedService>(Slots(slots), slot_ranges(arcs), limits);
}

void start_job(ReplicatedService& service, std::uint32_t job, const std::string& mode,
               std::uint32_t staleness, bool mean, std::uint32_t before) {
  SHOAL_CHECK(mode == "bsp" || mode == "ssp" || mode == "asp", "no mode " + mode + ": bsp, ssp or asp");
  const Mode chosen = mode == "bsp" ? Mode::kBsp : (mode == "ssp" ? Mode::kSsp : Mode::kAsp);
  const py::gil_scoped_release nogil;
  service.start_job(job, chosen, staleness, mean, before);
}

void add_table(ReplicatedService& service, std::uint32_t id, std::size_t dim, const std::string& dtype,
               const std::string& optimizer, std::map<std::string, double> params, const std::string& init,
               double init_parameter, std::uint64_t init_seed, std::uint64_t seed,
               const std::optional<NamedForm>& admit, const std::vector<NamedForm>& expire) {
  const TableSpec spec = make_spec(dim, dtype, optimizer, std::move(params), init, init_parameter, init_seed,
                                   seed, admit, expire);
  const py::gil_scoped_release nogil;
  service.add_table(id, spec);
}

py::bytes as_bytes(const void* data, std::size_t size) { return {static_cast<const char*>(data), size}; }

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

py::list handle(ReplicatedService& service, const py::bytes& peer, const py::sequence& message) {
  std::vector<BufferView> borrowed;
  std::vector<wire::Frame> frames;
  for (const py::handle frame : message) {
    frames.push_back(borrowed.emplace_back(frame).bytes());
  }
  const std::string name = peer;
  BufferPool pool;
  ReplyQueue out(pool);
  {
    const py::gil_scoped_release nogil;
    service.handle(name, frames, out);
  }
  return as_list(out);
}

py::list released(ReplicatedService& service) {
  BufferPool pool;
  ReplyQueue out(pool);
  service.released(out);
  return as_list(out);
}

template <class Name, std::size_t n>
py::dict counted(const std::array<std::uint64_t, n>& counts) {
  py::dict all;
  for (std::size_t i = 0; i < n; ++i) {
    if (counts[i] != 0) {
      all[py::str(std::string(wire::name(static_cast<Name>(i))))] = counts[i];
    }
  }
  return all;
}

// {least number of the bucket: count}
py::dict histogram(const Histogram& counts) {
  py::dict all;
  for (std::size_t b = 0; b < Histogram::kBuckets; ++b) {
    if (counts.count(b) != 0) {
      all[py::int_(Histogram::lower_bound(b))] = counts.count(b);
    }
  }
  return all;
}

py::dict metrics(const ReplicatedService& service) {
  ServiceMetrics now;
  {
    const py::gil_scoped_release nogil;
    now = service.metrics();
  }
  py::dict clocks;
  for (const auto& [rank, clock] : now.clocks) {
    clocks[py::int_(rank)] = clock;
  }
  py::dict all;
  all["messages"] = now.messages;
  all["bytes_in"] = now.bytes_in;
  all["replies"] = now.replies;
  all["bytes_out"] = now.bytes_out;
  all["requests"] = counted<wire::Op>(now.requests);
  all["statuses"] = counted<wire::Status>(now.statuses);
  all["duplicates"] = now.duplicates;
  all["dropped_pushes"] = now.dropped_pushes;
  all["failed_steps"] = now.failed_steps;
  all["deferred_reads"] = now.deferred_reads;
  all["deferred_peak"] = now.deferred_peak;
  all["deferred_bytes"] = now.deferred_bytes;
  all["pending_bytes"] = now.pending_bytes;
  all["pending_peak"] = now.pending_peak;
  all["key_lists"] = now.key_lists;
  all["key_list_bytes"] = now.key_list_bytes;
  all["key_list_hits"] = now.key_list_hits;
  all["key_list_misses"] = now.key_list_misses;
  all["weight_bytes_saved"] = now.weight_bytes_saved;
  all["narrowed"] = now.narrowed.values;
  all["narrowed_squared_error"] = now.narrowed.squared;
  all["narrowed_largest_error"] = now.narrowed.largest;
  all["applied"] = now.applied;
  all["floor"] = now.floor;
  all["clocks"] = clocks;
  all["pull_staleness"] = histogram(now.pull_staleness);
  all["push_staleness"] = histogram(now.push_staleness);
  return all;
}

// A copy of a table's rows, with the service's threads (why not keep_alive: bind/shard.cc).
py::object shard(const py::object& self, std::uint32_t id) {
  const auto& service = self.cast<const ReplicatedService&>();
  std::unique_ptr<Shard> copy;
  {
    const py::gil_scoped_release nogil;
    copy = service.snapshot(id);
  }
  py::object held = py::cast(std::move(copy));
  py::detail::keep_alive_impl(held, self);
  return held;
}

// --- saves ------------------------------------------------------------------------------------------------------

// Waits without the GIL for the next session; None after close_sessions(). Its memory belongs to the service.
py::object next_session(const py::object& self) {
  auto& service = self.cast<ReplicatedService&>();
  std::shared_ptr<CheckpointSession> save;
  {
    const py::gil_scoped_release nogil;
    save = service.next_session();
  }
  if (save == nullptr) {
    return py::none();
  }
  py::object held = py::cast(std::move(save));
  py::detail::keep_alive_impl(held, self);
  return held;
}

py::list summaries(const CheckpointSession& save) {
  py::list all;
  for (std::size_t t = 0; t < save.tables(); ++t) {
    const auto of_table =
        save.summaries().subspan(t * CheckpointSession::kSummaryWords, CheckpointSession::kSummaryWords);
    all.append(py::make_tuple(of_table[0], of_table[1], of_table[2], of_table[3]));
  }
  return all;
}

// (times, text)
py::tuple wait_request(const CheckpointSession& save, std::uint64_t times, double seconds) {
  CheckpointSession::Request request;
  {
    const py::gil_scoped_release nogil;
    request = save.wait_request(times, std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * seconds)));
  }
  return py::make_tuple(request.times, py::bytes(request.text));
}

Snapshot::Piece take(CheckpointSession& save, std::size_t table, std::size_t slot) {
  const py::gil_scoped_release nogil;
  return save.take(table, Slot{static_cast<std::uint32_t>(slot)});
}

std::size_t restore(CheckpointSession& save, std::size_t table, std::size_t rows,
                    const Array<std::uint8_t>& section) {
  const auto bytes = std::as_bytes(in(section));
  const py::gil_scoped_release nogil;
  return save.restore(table, rows, bytes);
}

void restore_filter(CheckpointSession& save, std::size_t table, std::size_t cut, std::size_t slot,
                    const Array<std::uint8_t>& filter) {
  const auto bytes = std::as_bytes(in(filter));
  const py::gil_scoped_release nogil;
  save.restore_filter(table, Slots(cut), Slot{static_cast<std::uint32_t>(slot)}, bytes);
}

}  // namespace

void add_service(py::module_& module) {
  using Nogil = py::call_guard<py::gil_scoped_release>;
  const ServiceLimits limits;
  py::class_<ReplicatedService>(module, "Service")
      .def(py::init(&make_service), py::arg("slots"), py::arg("arcs") = Ranges(), py::kw_only(),
           py::arg("deferred_reads") = limits.deferred_reads,
           py::arg("deferred_bytes") = limits.deferred_bytes, py::arg("pending_bytes") = limits.pending_bytes,
           py::arg("reply_bytes") = limits.reply_bytes, py::arg("key_list_bytes") = limits.key_list_bytes)
      .def(
          "set_map",
          [](ReplicatedService& service, std::uint32_t epoch, const Ranges& arcs) {
            service.set_map(epoch, slot_ranges(arcs));
          },
          py::arg("epoch"), py::arg("arcs"), Nogil())
      .def("start_job", &start_job, py::arg("job"), py::arg("mode"), py::arg("staleness") = 0,
           py::arg("mean") = false, py::arg("before") = 0)
      .def("admit", &ReplicatedService::admit, py::arg("rank"), py::arg("incarnation"), py::arg("clock"),
           Nogil())
      .def(
          "fence",
          [](ReplicatedService& service, std::uint32_t rank, std::uint32_t incarnation) {
            const LastTick last = service.fence(rank, incarnation);
            return std::pair(last.clock, last.tables);
          },
          py::arg("rank"), py::arg("incarnation"), Nogil())
      .def(
          "dismiss",
          [](ReplicatedService& service, std::uint32_t rank, std::uint32_t incarnation, std::uint32_t clock,
             std::vector<std::uint32_t> tables) {
            return service.dismiss(rank, incarnation, {.clock = clock, .tables = std::move(tables)});
          },
          py::arg("rank"), py::arg("incarnation"), py::arg("clock") = 0,
          py::arg("tables") = std::vector<std::uint32_t>(), Nogil())
      .def("hold", &ReplicatedService::hold, Nogil())
      .def("resume", &ReplicatedService::resume, Nogil())
      .def("add_table", &add_table, py::arg("id"), py::arg("dim"), py::arg("dtype"), py::arg("optimizer"),
           py::arg("params"), py::arg("init"), py::arg("init_parameter"), py::arg("init_seed"),
           py::arg("seed"), py::arg("admit") = py::none(), py::arg("expire") = py::list())
      .def("set_memory", &ReplicatedService::set_memory, py::arg("slot_bytes"), Nogil())
      .def("drop_table", &ReplicatedService::drop_table, py::arg("id"), Nogil())
      .def("tables", &ReplicatedService::tables, Nogil())
      .def("shard", &shard, py::arg("id"))
      .def("next_session", &next_session)
      .def("close_sessions", &ReplicatedService::close_sessions, Nogil())
      .def("handle", &handle, py::arg("peer"), py::arg("frames"))
      .def("released", &released)
      .def("metrics", &metrics);
  py::class_<CheckpointSession, std::shared_ptr<CheckpointSession>>(module, "CheckpointSession")
      .def_property_readonly("slots", &CheckpointSession::slots)
      .def_property_readonly("summaries", &summaries)
      .def_property_readonly("ended", &CheckpointSession::ended)
      .def("wait_request", &wait_request, py::arg("times") = 0, py::arg("seconds") = 0.0)
      .def("set_status", &CheckpointSession::set_status, py::arg("text"), Nogil())
      .def(
          "section",
          [](CheckpointSession& save, std::size_t table, std::size_t slot) {
            return section_of(take(save, table, slot));
          },
          py::arg("table"), py::arg("slot"))
      .def(
          "changes",
          [](CheckpointSession& save, std::size_t table, std::size_t slot) {
            return changes_of(take(save, table, slot));
          },
          py::arg("table"), py::arg("slot"))
      .def("restore", &restore, py::arg("table"), py::arg("rows"), py::arg("section").noconvert())
      .def("restore_filter", &restore_filter, py::arg("table"), py::arg("cut"), py::arg("slot"),
           py::arg("filter").noconvert())
      .def("cancel", &CheckpointSession::cancel, Nogil());
}

}  // namespace shoal::bind
