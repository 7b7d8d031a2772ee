#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "shard/user_function.h"

namespace shoal::bind {

namespace {

// The Python function that finds and calls users' functions, for the life of the process; guarded by the GIL.
PyObject* user_function = nullptr;

// Arrays over the engine's memory, which they share.
bool call_function(const RowsCall& rows, std::vector<double>& words) {
  auto shared = std::make_unique<std::shared_ptr<const void>>(rows.storage);
  const py::capsule owner(shared.get(),
                          [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); });
  static_cast<void>(shared.release());
  const auto array = [&](float* data, std::size_t dim) {
    return Array<float>({rows.block.rows, dim}, data, owner);
  };
  const py::object weights =
      rows.elements == Elements::kInt64Pairs
          ? py::object(Array<std::int64_t>({rows.block.rows, rows.block.dim / kInt64Floats},
                                           reinterpret_cast<std::int64_t*>(rows.weights), owner))
          : py::object(array(rows.weights, rows.block.dim));
  py::dict state;
  for (std::size_t k = rows.derives_weights ? 0 : 1; k < rows.columns.size(); ++k) {
    state[py::str(rows.columns[k])] = array(rows.block.columns[k], rows.block.dim);
  }
  if (!rows.row_state.empty()) {
    state[py::str(std::string(rows.row_state))] = array(rows.block.row_state, 1);
  }
  const py::bytes description(reinterpret_cast<const char*>(rows.description.data()),
                              rows.description.size());
  const py::tuple result = py::reinterpret_borrow<py::object>(user_function)(
      description, rows.writes,
      Array<std::uint64_t>(static_cast<py::ssize_t>(rows.hashes.size()), rows.hashes.data()), weights, state);
  const auto answer = result[1].cast<Array<double>>();
  const auto from = in(answer);
  words.assign(from.begin(), from.end());
  return result[0].cast<bool>();
}

bool call_function_guarded(const RowsCall& rows, std::vector<double>& words) {
  const py::gil_scoped_acquire gil;
  try {
    return call_function(rows, words);
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_MemoryError)) {
      throw std::bad_alloc();
    }
    throw;
  }
}

}  // namespace

void add_user_function(py::module_& module) {
  // `call`: called as call_function(description, writes, hashes, weights, state), see shoal.user_functions.
  module.def(
      "set_rows_function",
      [](const py::function& call_function) {
        Py_XSETREF(user_function, py::object(call_function).release().ptr());
        set_rows_function(&call_function_guarded);
      },
      py::arg("call"));
}

}  // namespace shoal::bind
