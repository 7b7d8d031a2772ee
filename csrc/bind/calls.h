// Calls of a cluster's worker in Python: their arrays, results and errors.
//
// A call may be settled by a thread that does not hold the GIL. The objects that own its arrays are therefore
// put aside, and are released by the next thread that enters with the GIL.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/array.h"
#include "client/filter.h"
#include "client/requests.h"

namespace shoal::bind {

namespace py = pybind11;

// Owns Python objects, and memory; the result may be released by any thread.
std::shared_ptr<const void> keep(std::vector<py::object>&& objects, std::shared_ptr<const void> memory = {});
// Releases what was put aside. With the GIL, and without the lock of a client.
void release_kept();

// Rank, incarnation, job.
using Identity = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;
client::WorkerIdentity identity_of(const Identity& worker);

// A submitted call and the array of its rows.
struct CallHandle {
  client::CallPtr call{};
  py::object out = py::none();
  py::object error = py::none();  // made once
};

// The exception of a call that has failed; None: it has not, or is not settled.
py::object error_of(CallHandle& handle);
// What a call that has succeeded returns.
py::object result_of(const CallHandle& handle);
// An exception of shoal.errors.
py::object make_error(const client::Failure& failure);
// A failure that raises a given exception.
client::Failure failure_of(const py::object& error);

// A map from the ClusterMap of Python.
client::SlotMap slot_map_of(const py::object& map);

// What a call is to do, and who owns its arrays.
struct Described {
  client::Operation operation{};
  std::vector<py::object> owners{};
  std::shared_ptr<const void> memory{};  // that is not of Python
  py::object out = py::none();
};

// Of the arguments by name that an op takes.
Described describe(wire::Op op, const py::kwargs& given);
// Calls that another one comes after.
std::vector<client::CallPtr> calls_of(const py::handle& after);

}  // namespace shoal::bind
