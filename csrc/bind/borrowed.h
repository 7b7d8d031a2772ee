// Messages as Python lends them: frames that are looked at and not copied.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

#include "wire/wire.h"

namespace shoal::bind {

namespace py = pybind11;

// From here on others may compute while a message is checked; below, handing the lock over costs more.
inline constexpr std::size_t kLarge = std::size_t{64} << 10U;

// The bytes of a bytes object, an array, a zmq.Frame: anything contiguous that lends its memory.
class Borrowed {
 public:
  explicit Borrowed(py::handle object, int access = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, access) != 0) {
      throw py::error_already_set();
    }
  }
  Borrowed(Borrowed&& other) noexcept : buffer_(other.buffer_) { other.buffer_.obj = nullptr; }
  Borrowed& operator=(Borrowed&&) = delete;
  ~Borrowed() { PyBuffer_Release(&buffer_); }

  wire::Frame bytes() const {
    return {static_cast<const std::byte*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }
  // Of what was borrowed with PyBUF_WRITABLE.
  std::span<std::byte> room() const {
    return {static_cast<std::byte*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }

 private:
  Py_buffer buffer_{};
};

inline std::size_t total(std::span<const wire::Frame> frames) {
  std::size_t bytes = 0;
  for (const wire::Frame frame : frames) {
    bytes += frame.size();
  }
  return bytes;
}

}  // namespace shoal::bind
