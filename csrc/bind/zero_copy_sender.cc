#include "transport/zero_copy_sender.h"

#include <array>
#include <memory>
#include <string>

#include "base/check.h"
#include "bind/bind.h"
#include "bind/buffer_view.h"
#include "bind/received_message.h"

namespace shoal::bind {

namespace py = pybind11;

namespace {

// The owners of borrowed frames are BufferViews; they are released here, with the GIL held.
class SenderBinding {
 public:
  explicit SenderBinding(const std::string& module) : sender_(Zmq::of(module)) {}
  ~SenderBinding() { release_owners(); }
  SenderBinding(const SenderBinding&) = delete;
  SenderBinding& operator=(const SenderBinding&) = delete;

  // Bytes sent.
  std::size_t send(std::uintptr_t socket, const py::sequence& parts) {
    release_owners();
    std::array<ZeroCopySender::Frame, 1 + wire::kMaxFrames> frames;
    std::array<std::unique_ptr<BufferView>, 1 + wire::kMaxFrames> borrowed;
    const std::size_t count = parts.size();
    SHOAL_CHECK(count >= 1 && count <= frames.size(), "a message has 1 to " + std::to_string(frames.size()) +
                                                          " frames, got " + std::to_string(count));
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      borrowed.at(i) = std::make_unique<BufferView>(parts[i]);
      frames.at(i).bytes = borrowed.at(i)->bytes();
      bytes += frames.at(i).bytes.size();
      if (frames.at(i).bytes.size() >= ZeroCopySender::kMinBorrowedBytes) {
        frames.at(i).owner = borrowed.at(i).get();
      }
    }
    const bool sent = sender_.send(reinterpret_cast<void*>(socket), std::span(frames).first(count));
    for (std::size_t i = 0; i < count; ++i) {
      if (frames.at(i).owner != nullptr) {
        static_cast<void>(borrowed.at(i).release());  // next_released() returns it
      }
    }
    if (!sent) {
      release_owners();
      throw TransportError("a message could not be sent: " +
                           std::string(sender_.zmq().error_text(sender_.zmq().error())));
    }
    return bytes;
  }

  // None if there is none.
  std::unique_ptr<ReceivedMessage> receive(std::uintptr_t socket) {
    auto received = std::make_unique<ReceivedMessage>(sender_.zmq());
    switch (received->message.receive(reinterpret_cast<void*>(socket))) {
      case MultipartMessage::Result::kMessage:
        return received;
      case MultipartMessage::Result::kNone:
        return nullptr;
      case MultipartMessage::Result::kClosed:
        break;
    }
    throw TransportError("the socket delivers no more messages: " +
                         std::string(sender_.zmq().error_text(sender_.zmq().error())));
  }

  std::size_t borrowed() {
    release_owners();
    return sender_.borrowed();
  }

 private:
  void release_owners() noexcept {
    for (void* owner = sender_.next_released(); owner != nullptr; owner = sender_.next_released()) {
      delete static_cast<BufferView*>(owner);
    }
  }

  ZeroCopySender sender_;
};

}  // namespace

void add_zero_copy_sender(py::module_& module) {
  py::class_<ReceivedMessage>(module, "ReceivedMessage")
      .def("__len__", [](const ReceivedMessage& received) { return received.message.count(); })
      .def_property_readonly("nbytes",
                             [](const ReceivedMessage& received) { return received.message.bytes(); });
  py::class_<SenderBinding>(module, "ZeroCopySender")
      .def(py::init<const std::string&>(), py::arg("module"))
      .def("send", &SenderBinding::send, py::arg("socket"), py::arg("frames"))
      .def("receive", &SenderBinding::receive, py::arg("socket"))
      .def_property_readonly("borrowed", &SenderBinding::borrowed);
}

}  // namespace shoal::bind
