#include "tier/tiered_shard.h"

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
#include "tier/storage_error.h"
#include "tier/tier_space.h"

namespace shoal::bind {

namespace {

std::unique_ptr<TieredShard> make_tiered(std::size_t dim, const std::string& dtype,
                                         const std::string& optimizer, std::map<std::string, double> params,
                                         const std::string& init, double init_parameter,
                                         std::uint64_t init_seed, std::uint64_t seed, std::size_t slots,
                                         PoolWithScratch& pool, const std::string& directory,
                                         std::size_t memory, const std::optional<NamedForm>& admit,
                                         const std::vector<NamedForm>& expire, bool async) {
  return std::make_unique<TieredShard>(make_spec(dim, dtype, optimizer, std::move(params), init,
                                                 init_parameter, init_seed, seed, admit, expire),
                                       Slots(slots), pool.threads, directory, memory,
                                       async ? ReadQueue::Engine::kBest : ReadQueue::Engine::kThreads);
}

void prefetch(const TieredShard& shard, const KeyBatch& batch, RowLocations* locations) {
  const py::gil_scoped_release nogil;
  shard.prefetch({batch.hashes(), batch.offsets()}, locations);
}

py::dict tier_stats(const TieredShard& shard) {
  return dict_of(kTierStatistics, [&] {
    const py::gil_scoped_release nogil;
    return *shard.tier_stats();
  }());
}

// The exceptions that users catch are classes of Python.
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

void add_tiered_shard(py::module_& module) {
  py::register_exception_translator(&translate);
  py::class_<TierSpace, std::shared_ptr<TierSpace>>(module, "TierSpace")
      .def(py::init<std::size_t>(), py::arg("memory"))
      .def("open", &TierSpace::open, py::arg("directory"));
  py::class_<TieredShard, Shard>(module, "TieredShard")
      .def(py::init(&make_tiered), py::arg("dim"), py::arg("dtype"), py::arg("optimizer"), py::arg("params"),
           py::arg("init"), py::arg("init_parameter"), py::arg("init_seed"), py::arg("seed"),
           py::arg("slots"), py::arg("pool"), py::arg("directory"), py::arg("memory"),
           py::arg("admit") = py::none(), py::arg("expire") = py::list(), py::arg("use_async") = true,
           py::keep_alive<1, 11>())
      .def("prefetch", &prefetch, py::arg("batch"), py::arg("locations") = py::none())
      .def("tier_stats", &tier_stats);
}

}  // namespace shoal::bind
