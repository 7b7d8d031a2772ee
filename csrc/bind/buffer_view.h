// BufferView: the memory of a Python object that supports the buffer protocol, without a copy.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

#include "base/units.h"
#include "wire/wire.h"

namespace shoal::bind {

namespace py = pybind11;

// For messages of at least this size the GIL is released; for smaller ones releasing it costs more than the
// work.
inline constexpr std::size_t kMinUnlockedBytes = 64 * KiB;

// A view of bytes, an array or a zmq.Frame: any contiguous buffer.
class BufferView {
 public:
  explicit BufferView(py::handle object, int access = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, access) != 0) {
      throw py::error_already_set();
    }
  }
  BufferView(BufferView&& other) noexcept : buffer_(other.buffer_) { other.buffer_.obj = nullptr; }
  BufferView& operator=(BufferView&&) = delete;
  ~BufferView() { PyBuffer_Release(&buffer_); }

  wire::Frame bytes() const {
    return {static_cast<const std::byte*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }
  // Requires that PyBUF_WRITABLE was requested.
  std::span<std::byte> writable_bytes() const {
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
