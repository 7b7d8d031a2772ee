// Bindings of the rows that a worker keeps.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "cache/row_cache.h"
#include "cache/slot_begins.h"

namespace shoal::bind {

namespace {

using Hashes = Array<std::uint64_t>;

// (hashes, offsets, numbers, counts or None); None: there are none. `width`: numbers of a row.
py::object sums_of(const RowCache::Sums& sums, std::size_t width, std::size_t slots) {
  if (sums.hashes.empty()) {
    return py::none();
  }
  Array<float> grads = fresh<float>(sums.hashes.size(), width);
  std::ranges::copy(sums.grads, grads.mutable_data());
  return py::make_tuple(copied(sums.hashes), copied(slot_begins(sums.hashes, slots)), grads,
                        sums.counts.empty() ? py::object(py::none()) : py::object(copied(sums.counts)));
}

// (positions that were fetched, their hashes, their offsets, positions that were joined, readers, sums).
py::tuple read_rows(RowCache& cache, const Hashes& hashes, std::uint32_t clocks, std::uint32_t reader,
                    bool may_join, Array<float>& rows, std::size_t slots) {
  const auto input = in(hashes);
  const auto to = out(rows);
  RowCache::Rest rest;
  {
    const py::gil_scoped_release nogil;
    cache.read(input, clocks, reader, may_join, to, rest);
  }
  Array<std::uint64_t> fetched = fresh<std::uint64_t>(rest.fetched.size());
  const auto fetched_hashes = out(fetched);
  for (std::size_t i = 0; i < fetched_hashes.size(); ++i) {
    fetched_hashes[i] = input[rest.fetched[i]];
  }
  return py::make_tuple(copied(rest.fetched), fetched, copied(slot_begins(fetched_hashes, slots)),
                        copied(rest.joined), rest.readers, sums_of(rest.sums, cache.width(), slots));
}

void fill(RowCache& cache, const Hashes& hashes, std::uint32_t reader, std::uint32_t clocks, bool is_kept,
          const Array<float>& rows) {
  const auto input = in(hashes);
  const auto from = in(rows);
  const py::gil_scoped_release nogil;
  cache.fill(input, reader, clocks, is_kept, from);
}

py::object add_rows(RowCache& cache, const Hashes& hashes, const Array<float>& grads,
                    const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock,
                    std::size_t slots) {
  const auto input = in(hashes);
  const auto from = in(grads);
  const auto times = counts ? in(*counts) : std::span<const std::uint32_t>{};
  RowCache::Sums passed;
  {
    const py::gil_scoped_release nogil;
    cache.add(input, from, times, clock, passed);
  }
  return sums_of(passed, cache.dim(), slots);
}

py::object send_older(RowCache& cache, std::uint32_t clock, std::size_t slots) {
  RowCache::Sums sums;
  {
    const py::gil_scoped_release nogil;
    cache.send_older(clock, sums);
  }
  return sums_of(sums, cache.width(), slots);
}

py::object send_rows(RowCache& cache, const Hashes& hashes, std::size_t slots) {
  RowCache::Sums sums;
  cache.send_rows(in(hashes), sums);
  return sums_of(sums, cache.width(), slots);
}

void copy_weights_of(RowCache& cache, const Array<float>& whole, const Array<std::uint32_t>& positions,
                     Array<float>& rows) {
  const auto from = in(whole);
  const auto at = in(positions);
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  cache.copy_weights_of(from, at, to);
}

}  // namespace

std::unique_ptr<RowCache> make_cache(const TableSpec& spec, std::size_t rows, bool local_steps) {
  std::optional<LocalSteps> steps;
  if (local_steps) {
    steps.emplace(spec.dim, spec.optimizer);
  }
  return std::make_unique<RowCache>(rows, spec.dim, spec.lifecycle.needs_counts(), std::move(steps));
}

void add_cache(py::module_& module) {
  const auto array = [](const char* name) { return py::arg(name).noconvert(); };
  py::class_<RowCache>(module, "RowCache")
      .def(py::init(&make_cache), py::arg("spec"), py::arg("rows"), py::arg("local_steps") = false)
      .def_property_readonly("width", &RowCache::width)
      .def("copy_weights_of", &copy_weights_of, array("whole"), array("positions"), array("rows"))
      .def_property_readonly("sums", &RowCache::sums)
      .def("read", &read_rows, array("hashes"), py::arg("clocks"), py::arg("reader"), py::arg("may_join"),
           array("rows"), py::arg("slots"))
      .def("fill", &fill, array("hashes"), py::arg("reader"), py::arg("clocks"), py::arg("is_kept"),
           array("rows"))
      .def("add", &add_rows, array("hashes"), array("grads"), array("counts"), py::arg("clock"),
           py::arg("slots"))
      .def("send_older", &send_older, py::arg("clock"), py::arg("slots"))
      .def("send_rows", &send_rows, array("hashes"), py::arg("slots"))
      .def("forget", &RowCache::forget)
      .def("stats", [](const RowCache& cache) { return dict_of(kRowCacheStatistics, cache); })
      .def("verify", &RowCache::verify);
  module.def(
      "local_step_floats",  // 0: the optimizer makes no local steps
      [](const std::string& optimizer, std::map<std::string, double> params, std::size_t dim) {
        const Optimizer rule(optimizer, std::move(params));
        return LocalSteps::suits(rule, dim) ? LocalSteps(dim, rule).floats() : 0;
      },
      py::arg("optimizer"), py::arg("params"), py::arg("dim"));
}

}  // namespace shoal::bind
