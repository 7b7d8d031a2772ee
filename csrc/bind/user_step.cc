#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "optim/user_rule.h"

namespace shoal::bind {

namespace {

// The Python function of all user's rules, for the life of the process; guarded by the GIL.
PyObject* function = nullptr;

// The exception of a step, which a caller in Python gets back as it was.
struct PythonStepError : UserStepError {
  explicit PythonStepError(const py::error_already_set& error)
      : UserStepError(error.type().attr("__name__").cast<std::string>() + ": " +
                      std::string(py::str(error.value()))),
        original(error) {}
  py::error_already_set original;
};

// Arrays over the engine's memory, which they share. The function may raise.
void call(const UserStep& step) {
  const Block& block = step.block;
  const auto rows = static_cast<py::ssize_t>(block.rows);
  const auto dim = static_cast<py::ssize_t>(block.dim);
  auto shared = std::make_unique<std::shared_ptr<const void>>(step.storage);
  const py::capsule owner(shared.get(),
                          [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); });
  static_cast<void>(shared.release());
  const auto number = static_cast<py::ssize_t>(sizeof(float));
  const std::vector<py::ssize_t> strides{
      step.states > 1 ? (block.columns[2] - block.columns[1]) * number : rows * dim * number, dim * number,
      number};
  const py::array_t<float> state(std::vector<py::ssize_t>{static_cast<py::ssize_t>(step.states), rows, dim},
                                 strides, step.states != 0 ? block.columns[1] : block.columns[0], owner);
  Array<std::int64_t> numbers = fresh<std::int64_t>(step.row_steps ? block.rows : 1, 1);
  const auto to = out(numbers);
  for (std::size_t r = 0; r < to.size(); ++r) {
    to[r] = static_cast<std::int64_t>(step.row_steps ? static_cast<std::uint64_t>(block.row_state[r])
                                                     : block.step);
  }
  py::array steps = numbers;
  if (!step.row_steps) {  // the same number for every row, without an array of them
    steps = py::array_t<std::int64_t>(std::vector<py::ssize_t>{rows, 1},
                                      std::vector<py::ssize_t>{0, sizeof(std::int64_t)}, to.data(), numbers);
  }
  py::detail::array_proxy(steps.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  py::reinterpret_borrow<py::object>(function)(step.params,
                                               Array<float>({rows, dim}, block.columns[0], owner), state,
                                               Array<float>({rows, dim}, block.grads, owner), steps);
}

void call_guarded(const UserStep& step) {
  const py::gil_scoped_acquire gil;
  try {
    call(step);
  } catch (const py::error_already_set& error) {
    throw PythonStepError(error);
  }
}

}  // namespace

void add_user_step(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (PythonStepError& error) {
      error.original.restore();
    }
  });
  // `steps`: called as steps(params, weights, state, grads, steps), see shoal.user_optimizer.
  module.def(
      "set_user_function",
      [](const py::function& steps) {
        Py_XSETREF(function, py::object(steps).release().ptr());
        set_user_function(&call_guarded);
      },
      py::arg("steps"));
}

}  // namespace shoal::bind
