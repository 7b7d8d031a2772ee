// Conversion between NumPy arrays and spans, in one place.
//
// Arguments are bound with .noconvert(): a wrong dtype or stride is a TypeError, never a silent copy (results
// written to a copied output would be lost). The Python layer checks arguments first, with error messages for
// users.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace shoal::bind {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> in(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// Throws ValueError if the array is read-only.
template <class T>
std::span<T> out(Array<T>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

// New, uninitialized arrays.
template <class T>
Array<T> fresh(std::size_t n) {
  return Array<T>(static_cast<py::ssize_t>(n));
}

template <class T>
Array<T> fresh(std::size_t n, std::size_t dim) {
  return Array<T>({static_cast<py::ssize_t>(n), static_cast<py::ssize_t>(dim)});
}

// A read-only array over memory that `owner` keeps alive.
template <class T>
Array<T> view(std::span<const T> data, const py::object& owner) {
  Array<T> array({static_cast<py::ssize_t>(data.size())}, {static_cast<py::ssize_t>(sizeof(T))}, data.data(),
                 owner);
  py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

template <class T>
Array<T> copied(std::span<const T> data) {
  return Array<T>(static_cast<py::ssize_t>(data.size()), data.data());
}

template <class T>
Array<T> copied(const std::vector<T>& data) {
  return copied(std::span<const T>(data));
}

// An array that owns its bytes.
inline Array<std::uint8_t> owned(std::vector<std::byte>&& bytes) {
  if (bytes.empty()) {
    return fresh<std::uint8_t>(0);
  }
  auto held = std::make_unique<std::vector<std::byte>>(std::move(bytes));
  const auto* const kept = held.get();
  const py::capsule owner(held.release(),
                          [](void* vector) { delete static_cast<std::vector<std::byte>*>(vector); });
  return view(std::span(reinterpret_cast<const std::uint8_t*>(kept->data()), kept->size()), owner);
}

// (hashes, weights), of rows of `dim` weights.
inline py::tuple rows_of(const std::vector<std::uint64_t>& hashes, const std::vector<float>& weights,
                         std::size_t dim) {
  Array<float> rows = fresh<float>(hashes.size(), dim);
  std::copy(weights.begin(), weights.end(), rows.mutable_data());
  return py::make_tuple(copied(hashes), rows);
}

}  // namespace shoal::bind
