#include "transport/zero_copy_sender.h"

#include <array>
#include <memory>
#include <string>

#include "base/check.h"
#include "bind/arrived.h"
#include "bind/bind.h"
#include "bind/borrowed.h"

namespace shoal::bind {

namespace py = pybind11;

namespace {

// The owners of what is lent are Borrowed: they are let go here, with Python's lock held.
class Carrier {
 public:
  explicit Carrier(const std::string& module) : courier_(Zmq::of(module)) {}
  ~Carrier() { let_go(); }
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  // Bytes sent.
  std::size_t send(std::uintptr_t socket, const py::sequence& given) {
    let_go();
    std::array<Courier::Frame, 1 + wire::kMaxFrames> frames;
    std::array<std::unique_ptr<Borrowed>, 1 + wire::kMaxFrames> borrowed;
    const std::size_t count = given.size();
    SHOAL_CHECK(count >= 1 && count <= frames.size(), "a message has 1 to " + std::to_string(frames.size()) +
                                                          " frames, got " + std::to_string(count));
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      borrowed.at(i) = std::make_unique<Borrowed>(given[i]);
      frames.at(i).bytes = borrowed.at(i)->bytes();
      bytes += frames.at(i).bytes.size();
      if (frames.at(i).bytes.size() >= Courier::kLent) {
        frames.at(i).owner = borrowed.at(i).get();
      }
    }
    const bool sent = courier_.send(reinterpret_cast<void*>(socket), std::span(frames).first(count));
    for (std::size_t i = 0; i < count; ++i) {
      if (frames.at(i).owner != nullptr) {
        static_cast<void>(borrowed.at(i).release());  // returned() brings it back
      }
    }
    if (!sent) {
      let_go();
      throw TransportError("a message could not be sent: " +
                           std::string(courier_.zmq().error_text(courier_.zmq().error())));
    }
    return bytes;
  }

  // Nothing where there is none.
  std::unique_ptr<Arrived> receive(std::uintptr_t socket) {
    auto arrived = std::make_unique<Arrived>(courier_.zmq());
    switch (arrived->parts.receive(reinterpret_cast<void*>(socket))) {
      case Parts::Got::kMessage:
        return arrived;
      case Parts::Got::kNothing:
        return nullptr;
      case Parts::Got::kEnd:
        break;
    }
    throw TransportError("the socket gives no more messages: " +
                         std::string(courier_.zmq().error_text(courier_.zmq().error())));
  }

  std::size_t lent() {
    let_go();
    return courier_.lent();
  }

 private:
  void let_go() noexcept {
    for (void* owner = courier_.returned(); owner != nullptr; owner = courier_.returned()) {
      delete static_cast<Borrowed*>(owner);
    }
  }

  Courier courier_;
};

}  // namespace

void add_courier(py::module_& module) {
  py::class_<Arrived>(module, "Arrived")
      .def("__len__", [](const Arrived& arrived) { return arrived.parts.count(); })
      .def_property_readonly("nbytes", [](const Arrived& arrived) { return arrived.parts.bytes(); });
  py::class_<Carrier>(module, "Courier")
      .def(py::init<const std::string&>(), py::arg("module"))
      .def("send", &Carrier::send, py::arg("socket"), py::arg("frames"))
      .def("receive", &Carrier::receive, py::arg("socket"))
      .def_property_readonly("lent", &Carrier::lent);
}

}  // namespace shoal::bind
