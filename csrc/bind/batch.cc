#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "batch/key_batch.h"
#include "batch/merge.h"
#include "batch/summed_batch.h"
#include "batch/unique_keys.h"
#include "bind/array.h"
#include "bind/bind.h"

namespace shoal::bind {

namespace {

// Whether rows are int64, in pairs of floats.
Elements elements_of(bool integers) noexcept { return integers ? Elements::kInt64Pairs : Elements::kFloat32; }

std::unique_ptr<KeyBatch> make_batch(const Array<std::uint64_t>& keys, std::size_t slots,
                                     PoolWithScratch& pool, std::optional<std::uint64_t> last) {
  const auto input = in(keys);
  const py::gil_scoped_release nogil;
  return pool.with_scratch([&](KeyBatchScratch& scratch, GradientScratch& /*unused*/) {
    return std::make_unique<KeyBatch>(input, Slots(slots), pool.threads, scratch, last);
  });
}

std::unique_ptr<UniqueKeys> make_unique_keys(const Array<std::uint64_t>& keys, std::size_t slots,
                                             PoolWithScratch& pool, std::optional<std::uint64_t> last) {
  const auto input = in(keys);
  const py::gil_scoped_release nogil;
  return pool.with_scratch([&](KeyBatchScratch& scratch, GradientScratch& /*unused*/) {
    return std::make_unique<UniqueKeys>(input, Slots(slots), pool.threads, scratch, last);
  });
}

std::unique_ptr<SummedBatch> make_summed(const Array<std::uint64_t>& keys, const Array<float>& rows,
                                         std::size_t dim, std::size_t slots, PoolWithScratch& pool,
                                         bool counting, bool integers) {
  const auto input = in(keys);
  const auto from = in(rows);
  const py::gil_scoped_release nogil;
  return pool.with_scratch([&](KeyBatchScratch& scratch, GradientScratch& /*unused*/) {
    return std::make_unique<SummedBatch>(input, from, dim, Slots(slots), pool.threads, scratch, counting,
                                         elements_of(integers));
  });
}

void sum(const KeyBatch& batch, const Array<float>& grads, std::size_t dim, Array<float>& sums,
         PoolWithScratch& pool, bool integers) {
  const auto from = in(grads);
  const auto to = out(sums);
  const py::gil_scoped_release nogil;
  batch.sum(from, dim, to, pool.threads, elements_of(integers));
}

// Copies the rows of unique keys to every key of the batch, in its order.
void expand(const KeyBatch& batch, const Array<float>& rows, std::size_t dim, Array<float>& expanded,
            PoolWithScratch& pool) {
  const auto from = in(rows);
  const auto to = out(expanded);
  SHOAL_CHECK(from.size() == batch.size() * dim && to.size() == batch.input_size() * dim,
              "expand takes one row a unique key and gives one row a key");
  const py::gil_scoped_release nogil;
  batch.expand(from, dim, to, pool.threads);
}

bool is_of(const KeyBatch& batch, const Array<std::uint64_t>& keys, PoolWithScratch& pool) {
  const auto input = in(keys);
  const py::gil_scoped_release nogil;
  return batch.is_of(input, pool.threads);
}

Array<std::uint32_t> counts(const KeyBatch& batch) {
  Array<std::uint32_t> result = fresh<std::uint32_t>(batch.size());
  batch.counts(out(result));
  return result;
}

py::tuple merge_lists(const std::vector<std::pair<Array<std::uint64_t>, Array<float>>>& lists,
                      std::size_t dim, PoolWithScratch& pool) {
  std::vector<SortedList> sorted;
  for (const auto& [hashes, grads] : lists) {
    sorted.push_back({in(hashes), in(grads), {}});
  }
  std::size_t total = 0;
  for (const SortedList& list : sorted) {
    total += list.hashes.size();
  }
  std::vector<std::uint64_t> all_hashes(total);
  std::vector<float> all_grads(total * dim);
  std::size_t size = 0;
  {
    const py::gil_scoped_release nogil;
    MergeScratch scratch;
    size = merge(sorted, dim, pool.threads, scratch, {all_hashes, all_grads, {}});
  }
  Array<std::uint64_t> hashes = fresh<std::uint64_t>(size);
  Array<float> grads = fresh<float>(size, dim);
  std::copy_n(all_hashes.data(), size, hashes.mutable_data());
  std::copy_n(all_grads.data(), size * dim, grads.mutable_data());
  return py::make_tuple(hashes, grads);
}

}  // namespace

void add_batch(py::module_& module) {
  py::class_<KeyBatch>(module, "KeyBatch")
      .def(py::init(&make_batch), py::arg("keys").noconvert(), py::arg("slots"), py::arg("pool"),
           py::arg("last") = py::none())
      .def("__len__", &KeyBatch::size)
      .def_property_readonly("input_size", &KeyBatch::input_size)
      .def_property_readonly("slots", [](const KeyBatch& batch) { return batch.slots().count(); })
      .def_property_readonly(
          "hashes", [](const py::object& self) { return view(self.cast<const KeyBatch&>().hashes(), self); })
      .def_property_readonly(
          "inverse",
          [](const py::object& self) { return view(self.cast<const KeyBatch&>().inverse(), self); })
      .def_property_readonly(
          "offsets",
          [](const py::object& self) { return view(self.cast<const KeyBatch&>().offsets(), self); })
      .def("counts", &counts)
      .def("sum", &sum, py::arg("grads").noconvert(), py::arg("dim"), py::arg("out").noconvert(),
           py::arg("pool"), py::arg("integers") = false)
      .def("expand", &expand, py::arg("rows").noconvert(), py::arg("dim"), py::arg("out").noconvert(),
           py::arg("pool"))
      .def("is_of", &is_of, py::arg("keys").noconvert(), py::arg("pool"))
      .def("verify", &KeyBatch::verify);
  py::class_<UniqueKeys>(module, "UniqueKeys")
      .def(py::init(&make_unique_keys), py::arg("keys").noconvert(), py::arg("slots"), py::arg("pool"),
           py::arg("last") = py::none())
      .def("__len__", &UniqueKeys::size)
      .def_property_readonly(
          "hashes",
          [](const py::object& self) { return view(self.cast<const UniqueKeys&>().hashes(), self); })
      .def_property_readonly(
          "inverse",
          [](const py::object& self) { return view(self.cast<const UniqueKeys&>().inverse(), self); })
      .def_property_readonly("offsets", [](const py::object& self) {
        return view(self.cast<const UniqueKeys&>().offsets(), self);
      });
  py::class_<SummedBatch>(module, "SummedBatch")
      .def(py::init(&make_summed), py::arg("keys").noconvert(), py::arg("rows").noconvert(), py::arg("dim"),
           py::arg("slots"), py::arg("pool"), py::arg("counting") = false, py::arg("integers") = false)
      .def("__len__", &SummedBatch::size)
      .def("counts",
           [](const py::object& self) {
             const auto& batch = self.cast<const SummedBatch&>();
             SHOAL_CHECK(batch.counts().size() == batch.size(), "this batch was made without counting");
             return view(batch.counts(), self);
           })
      .def_property_readonly(
          "hashes",
          [](const py::object& self) { return view(self.cast<const SummedBatch&>().hashes(), self); })
      .def_property_readonly(
          "offsets",
          [](const py::object& self) { return view(self.cast<const SummedBatch&>().offsets(), self); })
      .def_property_readonly("sums", [](const py::object& self) {
        const auto& batch = self.cast<const SummedBatch&>();
        return view(batch.sums(), self).reshape({batch.size(), batch.dim()});
      });
  module.def("merge", &merge_lists, py::arg("lists"), py::arg("dim"), py::arg("pool"));
}

}  // namespace shoal::bind
