#include "export/export_reader.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "table/dirty_ranges.h"

namespace shoal::bind {

namespace {

// A section, as passed by Python: slot, offset and bytes in its file, rows, homes, lines, reach, width.
constexpr std::size_t kSectionWords = 8;

// `dtype`: as which the weights of the table are stored in the export.
std::unique_ptr<ExportReader> make_reader(const TableSpec& spec, const std::string& dtype,
                                          std::size_t slots) {
  return std::make_unique<ExportReader>(RowFormat(dtype, spec.dim), spec.init, Slots(slots));
}

Slot slot_of(const ExportReader& reader, std::size_t slot) {
  SHOAL_CHECK(slot < reader.slots().count(), "there is no slot " + std::to_string(slot));
  return Slot{static_cast<std::uint32_t>(slot)};
}

void add_part(ExportReader& reader, const Array<std::uint8_t>& file, const Array<std::uint64_t>& sections) {
  const auto bytes = std::as_bytes(in(file));
  const auto words = in(sections);
  SHOAL_CHECK(words.size() % kSectionWords == 0, "a section is described by 8 numbers");
  for (std::size_t k = 0; k < words.size(); k += kSectionWords) {
    const auto* const w = words.data() + k;
    SHOAL_CHECK(w[1] <= bytes.size() && w[2] <= bytes.size() - w[1],
                "slot " + std::to_string(w[0]) + " lies outside of its file");
    reader.add(slot_of(reader, w[0]),
               {.rows = w[3], .homes = w[4], .lines = w[5], .reach = w[6], .width = w[7]},
               bytes.subspan(w[1], w[2]));
  }
}

void pull_exported(const ExportReader& reader, const Array<std::uint64_t>& keys, Array<float>& rows,
                   PoolWithScratch& pool, bool hashed) {
  const auto from = in(keys);
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  reader.pull(from, hashed ? ExportReader::KeyKind::kHash : ExportReader::KeyKind::kKey, to, pool.threads);
}

Array<std::uint8_t> contains_exported(const ExportReader& reader, const Array<std::uint64_t>& keys,
                                      PoolWithScratch& pool) {
  Array<std::uint8_t> there = fresh<std::uint8_t>(static_cast<std::size_t>(keys.size()));
  const auto from = in(keys);
  const auto to = out(there);
  const py::gil_scoped_release nogil;
  reader.contains(from, ExportReader::KeyKind::kKey, to, pool.threads);
  return there;
}

// (hashes, weights) of one slot.
py::tuple read_exported(const ExportReader& reader, std::size_t slot) {
  const Slot which = slot_of(reader, slot);
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  {
    const py::gil_scoped_release nogil;
    reader.read_slot(which, hashes, weights);
  }
  return rows_of(hashes, weights, reader.form().dim());
}

py::tuple difference(const ExportReader& reader, std::size_t slot, const Array<std::uint64_t>& hashes,
                     const Array<float>& weights) {
  const Slot which = slot_of(reader, slot);
  const auto from = in(hashes);
  const auto rows = in(weights);
  std::vector<std::uint64_t> changed;
  std::vector<float> now;
  {
    const py::gil_scoped_release nogil;
    reader.difference(which, from, rows, changed, now);
  }
  return rows_of(changed, now, reader.form().dim());
}

// The same within the ranges of a saved DirtyRanges.
py::tuple difference_in(const ExportReader& reader, std::size_t slot, const Array<std::uint64_t>& hashes,
                        const Array<float>& weights, unsigned bits, std::size_t count,
                        const Array<std::uint8_t>& ranges) {
  const Slot which = slot_of(reader, slot);
  const auto from = in(hashes);
  const auto rows = in(weights);
  const auto saved = std::as_bytes(in(ranges));
  std::vector<std::uint64_t> changed;
  std::vector<float> now;
  {
    const py::gil_scoped_release nogil;
    std::vector<ExportReader::HashRange> within;
    DirtyRanges(reader.slots(), bits, count, saved).each_run([&](std::uint64_t first, std::uint64_t last) {
      within.push_back({first, last});
    });
    reader.difference(which, from, rows, changed, now, within);
  }
  return rows_of(changed, now, reader.form().dim());
}

// (bytes, (rows, homes, lines, reach, width), dropped, largest error, squared errors, squares)
py::tuple pack_slot(const ExportReader& reader, std::size_t slot, const Array<std::uint64_t>& hashes,
                    const Array<float>& weights) {
  const Slot which = slot_of(reader, slot);
  const auto from = in(hashes);
  const auto rows = in(weights);
  auto packed = std::make_unique<PackedSection>();
  {
    const py::gil_scoped_release nogil;
    *packed = reader.pack(which, from, rows);
  }
  const SectionShape shape = packed->shape;
  const py::tuple errors = py::make_tuple(packed->largest_error, packed->squared_errors, packed->squares);
  const std::uint64_t dropped = packed->dropped;
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(packed->bytes.data()), packed->bytes.size());
  const py::capsule owner(packed.release(), [](void* of) { delete static_cast<PackedSection*>(of); });
  return py::make_tuple(view(bytes, owner),
                        py::make_tuple(shape.rows, shape.homes, shape.lines, shape.reach, shape.width),
                        dropped, errors);
}

}  // namespace

void add_export(py::module_& module) {
  py::class_<ExportReader>(module, "ExportReader")
      .def(py::init(&make_reader), py::arg("spec"), py::arg("dtype"), py::arg("slots"))
      .def("add_layer", &ExportReader::add_layer)
      .def("add", &add_part, py::arg("file").noconvert(), py::arg("sections").noconvert(),
           py::keep_alive<1, 2>())
      .def("pull", &pull_exported, py::arg("keys").noconvert(), py::arg("rows").noconvert(), py::arg("pool"),
           py::arg("hashed") = false)
      .def("contains", &contains_exported, py::arg("keys").noconvert(), py::arg("pool"))
      .def("read_slot", &read_exported, py::arg("slot"))
      .def("difference", &difference, py::arg("slot"), py::arg("hashes").noconvert(),
           py::arg("weights").noconvert())
      .def("difference_in", &difference_in, py::arg("slot"), py::arg("hashes").noconvert(),
           py::arg("weights").noconvert(), py::arg("bits"), py::arg("count"), py::arg("ranges").noconvert())
      .def("pack", &pack_slot, py::arg("slot"), py::arg("hashes").noconvert(),
           py::arg("weights").noconvert());
}

}  // namespace shoal::bind
