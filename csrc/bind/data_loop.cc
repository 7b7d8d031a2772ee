#include <memory>
#include <string>

#include "bind/bind.h"
#include "endpoint/data_loop.h"
#include "transport/zmq.h"

namespace shoal::bind {

namespace py = pybind11;

namespace {

std::unique_ptr<DataLoop> make_loop(Endpoint& endpoint, std::uintptr_t context, const std::string& module,
                                    std::string address, std::size_t max_message, std::size_t unsent_bytes,
                                    int replies_per_peer, int heartbeat_ms, int dead_after_ms, int linger_ms,
                                    std::string curve_secret, std::string curve_public,
                                    std::string zap_domain) {
  LoopOptions options{.address = std::move(address),
                      .max_message = max_message,
                      .unsent_bytes = unsent_bytes,
                      .replies_per_peer = replies_per_peer,
                      .heartbeat_ms = heartbeat_ms,
                      .dead_after_ms = dead_after_ms,
                      .linger_ms = linger_ms,
                      .curve_secret = std::move(curve_secret),
                      .curve_public = std::move(curve_public),
                      .zap_domain = std::move(zap_domain)};
  const py::gil_scoped_release nogil;
  return std::make_unique<DataLoop>(Zmq::of(module), reinterpret_cast<void*>(context), endpoint,
                                    std::move(options));
}

py::dict loop_metrics(const DataLoop& loop) { return dict_of(kLoopStatistics, loop.metrics()); }

// {op: (seconds in total, {least nanoseconds of a bucket: count})} of the ops that occurred
py::dict loop_durations(const DataLoop& loop) {
  const DurationHistograms& found = loop.durations();
  py::dict named;
  for (std::size_t op = 0; op < DurationHistograms::kOps; ++op) {
    py::dict counts;
    for (std::size_t b = 0; b < DurationHistograms::kBuckets; ++b) {
      if (const std::uint64_t count = found.count(op, b); count != 0) {
        counts[py::int_(DurationHistograms::lower_bound(b))] = count;
      }
    }
    if (!counts.empty()) {
      named[py::str(std::string(wire::name(static_cast<wire::Op>(op))))] =
          py::make_tuple(static_cast<double>(found.total_ns(op)) / 1e9, counts);
    }
  }
  return named;
}

}  // namespace

void add_data_loop(py::module_& module) {
  py::register_exception<TransportError>(module, "TransportError", module.attr("ShoalError").ptr());
  module.def("zmq_constants", [] {
    py::dict named;
    for (const auto& [name, value] : zmq::names()) {
      named[py::str(name.data(), name.size())] = value;
    }
    return named;
  });
  const LoopOptions usual;
  py::class_<DataLoop>(module, "DataLoop", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_loop), py::arg("endpoint"), py::arg("context"), py::arg("module"),
           py::arg("address"), py::kw_only(), py::arg("max_message") = usual.max_message,
           py::arg("unsent_bytes") = usual.unsent_bytes, py::arg("replies_per_peer") = usual.replies_per_peer,
           py::arg("heartbeat_ms") = usual.heartbeat_ms, py::arg("dead_after_ms") = usual.dead_after_ms,
           py::arg("linger_ms") = usual.linger_ms, py::arg("curve_secret") = "", py::arg("curve_public") = "",
           py::arg("zap_domain") = "", py::keep_alive<1, 2>())
      .def_property_readonly("address", &DataLoop::address)
      .def_property_readonly("running", &DataLoop::running)
      .def("stop", &DataLoop::stop, py::call_guard<py::gil_scoped_release>())
      .def("metrics", &loop_metrics)
      .def("durations", &loop_durations);
}

}  // namespace shoal::bind
