// The description of a table in Python: `TableSpec`, which everything that holds rows of the table takes.

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "shard/shard.h"

namespace shoal::bind {

namespace {

constexpr const char* kInt64 = "int64";  // its numbers are pairs of floats (base/int64_pairs.h)

// Parts of a table in Python: a name, its parameters, and the seed of initial rows.
using NamedParams = std::pair<std::string, std::map<std::string, double>>;
using NamedInit = std::tuple<std::string, double, std::uint64_t>;

Dtype dtype_of(const std::string& name) {
  SHOAL_CHECK(name == "float32" || name == "float16" || name == "bfloat16" || name == kInt64,
              "no dtype " + name + ": float32, float16, bfloat16 or int64");
  return name == "float32" || name == kInt64 ? Dtype::kFloat32
                                             : (name == "float16" ? Dtype::kFloat16 : Dtype::kBfloat16);
}

TableSpec make_spec(std::size_t dim, const std::string& dtype, const NamedParams& optimizer,
                    const NamedInit& init, std::uint64_t seed, const std::optional<NamedParams>& admit,
                    const std::vector<NamedParams>& expire) {
  std::vector<NamedRule> rules;
  for (const auto& [name, params] : expire) {
    rules.push_back({name, params});
  }
  const bool is_int64 = dtype == kInt64;
  Optimizer rule(optimizer.first, optimizer.second);
  SHOAL_CHECK((rule.elements() == Elements::kInt64Pairs) == is_int64,
              is_int64 ? "a table of int64 adds what is pushed: its optimizer is Add, got " + optimizer.first
                       : "Add is for tables of int64, got " + dtype);
  return {.dim = is_int64 ? dim * kInt64Floats : dim,
          .dtype = dtype_of(dtype),
          .optimizer = std::move(rule),
          .init = std::make_from_tuple<Init>(init),
          .seed = seed,
          .lifecycle =
              Lifecycle(admit ? std::optional(NamedRule{admit->first, admit->second}) : std::nullopt, rules)};
}

}  // namespace

void add_table_spec(py::module_& module) {
  py::class_<TableSpec>(module, "TableSpec")
      .def(py::init(&make_spec), py::kw_only(), py::arg("dim"), py::arg("dtype"), py::arg("optimizer"),
           py::arg("init"), py::arg("seed"), py::arg("admit") = py::none(), py::arg("expire") = py::list())
      .def_readonly("floats", &TableSpec::dim)  // of a row
      .def_property_readonly("needs_counts",
                             [](const TableSpec& spec) { return spec.lifecycle.needs_counts(); });
}

}  // namespace shoal::bind
