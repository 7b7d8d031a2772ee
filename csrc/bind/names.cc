// Bindings of texts by key.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bind/array.h"
#include "bind/bind.h"
#include "names/text_map.h"

namespace shoal::bind {

namespace {

Array<std::uint32_t> missing(TextMap& map, const Array<std::uint64_t>& keys) {
  const auto input = in(keys);
  std::vector<std::uint32_t> positions;
  {
    const py::gil_scoped_release nogil;
    positions = map.missing(input);
  }
  return copied(positions);
}

void map_names(TextMap& map, const Array<std::uint64_t>& keys, const Array<std::uint8_t>& text,
               const Array<std::uint64_t>& ends, std::size_t most) {
  const auto input = in(keys);
  const TextMap::Texts texts{in(text), in(ends)};
  const py::gil_scoped_release nogil;
  map.add(input, texts, most);
}

std::optional<py::bytes> get(const TextMap& map, std::uint64_t key) {
  const auto text = map.find(key);
  if (!text) {
    return std::nullopt;
  }
  return py::bytes(reinterpret_cast<const char*>(text->data()), text->size());
}

py::tuple texts_of(const TextMap& map, const Array<std::uint64_t>& keys) {
  const auto input = in(keys);
  TextMap::OwnedTexts texts;
  {
    const py::gil_scoped_release nogil;
    texts = map.texts_of(input);
  }
  return py::make_tuple(owned(std::move(texts.bytes)), copied(texts.ends));
}

Array<std::uint32_t> differing(const TextMap& map, const Array<std::uint64_t>& keys,
                               const Array<std::uint8_t>& text, const Array<std::uint64_t>& ends) {
  const auto input = in(keys);
  const TextMap::Texts texts{in(text), in(ends)};
  std::vector<std::uint32_t> positions;
  {
    const py::gil_scoped_release nogil;
    positions = map.differing(input, texts);
  }
  return copied(positions);
}

// (keys, text, ends).
py::tuple sorted(const TextMap& map) {
  TextMap::Sorted sorted;
  {
    const py::gil_scoped_release nogil;
    sorted = map.sorted();
  }
  return py::make_tuple(copied(sorted.keys), owned(std::move(sorted.texts.bytes)), copied(sorted.texts.ends));
}

}  // namespace

void add_names(py::module_& module) {
  py::class_<TextMap>(module, "TextMap")
      .def(py::init<>())
      .def("__len__", &TextMap::size)
      .def_property_readonly("memory_bytes", &TextMap::bytes)
      .def("missing", &missing, py::arg("keys").noconvert())
      .def("add", &map_names, py::arg("keys").noconvert(), py::arg("text").noconvert(),
           py::arg("ends").noconvert(), py::arg("most"))
      .def("get", &get, py::arg("key"))
      .def("texts_of", &texts_of, py::arg("keys").noconvert())
      .def("differing", &differing, py::arg("keys").noconvert(), py::arg("text").noconvert(),
           py::arg("ends").noconvert())
      .def("keys",
           [](const TextMap& map) {
             return copied(std::vector<std::uint64_t>(map.keys().begin(), map.keys().end()));
           })
      .def("sorted", &sorted);
}

}  // namespace shoal::bind
