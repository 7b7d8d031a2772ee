// What answers prediction requests without Python.

#include "serve/prediction_handler.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"

namespace shoal::bind {

namespace py = pybind11;

namespace {

// As Python has them: (name, number, schema, model), and (path, protocol, [(share up to which, version), ...]).
using Version = std::tuple<std::string, std::uint64_t, std::shared_ptr<predict::InputSchema>,
                           std::shared_ptr<predict::Model>>;
using NamedRoute = std::tuple<std::string, predict::Protocol, std::vector<std::pair<double, std::size_t>>>;

std::shared_ptr<PredictionHandler> make_handler(const std::vector<Version>& versions,
                                                const std::vector<NamedRoute>& routes,
                                                std::uint64_t decoded_bytes, bool refuse_unknown,
                                                std::shared_ptr<PredictionCounters> counters,
                                                std::shared_ptr<ByteBudget> budget) {
  std::vector<ServedVersion> served;
  for (const auto& [name, number, schema, model] : versions) {
    served.push_back({.name = name, .number = number, .schema = schema, .model = model});
  }
  std::vector<Route> found;
  for (const auto& [path, protocol, choices] : routes) {
    Route& route = found.emplace_back(Route{.path = path, .protocol = protocol, .choices = {}});
    for (const auto& [below, version] : choices) {
      route.choices.push_back({.below = below, .version = version});
    }
  }
  return std::make_shared<PredictionHandler>(
      std::move(served), found,
      PredictionLimits{.decoded_bytes = decoded_bytes, .refuse_unknown = refuse_unknown}, std::move(counters),
      std::move(budget));
}

}  // namespace

void add_serve(py::module_& module) {
  py::class_<PredictionCounters, std::shared_ptr<PredictionCounters>>(module, "PredictionCounters")
      .def(py::init<>())
      .def(
          "add",
          [](PredictionCounters& counters, const std::string& model, std::uint64_t number,
             std::uint64_t examples) { counters.add(*counters.answers_of(model, number), examples); },
          py::arg("model"), py::arg("number"), py::arg("examples"))
      .def("add_unknown", &PredictionCounters::add_unknown, py::arg("model"), py::arg("count"))
      .def_property_readonly("examples", &PredictionCounters::examples)
      .def("answers", &PredictionCounters::answers)
      .def("unknown", &PredictionCounters::unknown);
  py::class_<PredictionHandler, FastHandler, std::shared_ptr<PredictionHandler>>(module, "PredictionHandler")
      .def(py::init(&make_handler), py::arg("versions"), py::arg("routes"), py::kw_only(),
           py::arg("decoded_bytes"), py::arg("refuse_unknown"), py::arg("counters"), py::arg("budget"));
}

}  // namespace shoal::bind
