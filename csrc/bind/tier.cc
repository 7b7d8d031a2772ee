// Tiers in Python: the directory and memory of a server's, and errors as the exceptions that users catch.

#include <cstddef>
#include <exception>
#include <memory>

#include "bind/array.h"
#include "bind/bind.h"
#include "tier/storage_error.h"
#include "tier/tier_space.h"

namespace shoal::bind {

namespace {

// These exceptions are classes of Python.
void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const std::exception& error) {
    const py::object type = py::module_::import("shoal.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
  };
  try {
    if (thrown) {
      std::rethrow_exception(thrown);
    }
  } catch (const TierStorageError& error) {
    raise("StorageError", error);
  } catch (const TierCorruptionError& error) {
    raise("CorruptionError", error);
  }
}

}  // namespace

void add_tier(py::module_& module) {
  py::register_exception_translator(&translate);
  py::class_<TierSpace, std::shared_ptr<TierSpace>>(module, "TierSpace")
      .def(py::init<std::size_t>(), py::arg("memory"))
      .def("open", &TierSpace::open, py::arg("directory"));
}

}  // namespace shoal::bind
