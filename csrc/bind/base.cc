#include <cstddef>
#include <cstdint>
#include <span>

#include "base/crc32c.h"
#include "base/heap.h"
#include "base/mix.h"
#include "base/thread_team.h"
#include "bind/array.h"
#include "bind/bind.h"

namespace shoal::bind {

namespace {

using Word = std::uint64_t;

template <class Map>
Array<Word> mapped(const Array<Word>& words, const Map& map) {
  Array<Word> result = fresh<Word>(static_cast<std::size_t>(words.size()));
  const auto from = in(words);
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i] = map(from[i]);
  }
  return result;
}

std::uint32_t checksum(const py::buffer& buffer, std::uint32_t before) {
  const py::buffer_info info = buffer.request();
  const std::span bytes(static_cast<const std::byte*>(info.ptr),
                        static_cast<std::size_t>(info.size * info.itemsize));
  const py::gil_scoped_release nogil;
  return crc32c(bytes, before);
}

}  // namespace

void add_base(py::module_& module) {
  py::class_<PoolWithScratch>(module, "ThreadPool")
      .def(py::init<std::size_t>(), py::arg("threads"))
      .def_property_readonly("threads", [](const PoolWithScratch& pool) { return pool.threads.threads(); })
      .def("restart_after_fork", [](PoolWithScratch& pool) { pool.threads.restart_after_fork(); });
  // `team`: the address of a ParallelRun.
  module.def(
      "set_thread_team",
      [](std::uintptr_t team, std::size_t threads) {
        set_thread_team(reinterpret_cast<ParallelRun>(team), threads);
      },
      py::arg("team"), py::arg("threads"));
  module.def(
      "mix", [](const Array<Word>& keys) { return mapped(keys, [](Word key) { return mix(key); }); },
      py::arg("keys").noconvert());
  module.def(
      "unmix",
      [](const Array<Word>& hashes) { return mapped(hashes, [](Word hash) { return unmix(hash); }); },
      py::arg("hashes").noconvert());
  module.def("keep_freed_memory", &keep_freed_memory);
  module.def("crc32c", &checksum, py::arg("buffer"), py::arg("before") = 0);
}

}  // namespace shoal::bind
