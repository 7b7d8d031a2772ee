#include "transport/outgoing_message.h"

#include <cerrno>
#include <cstring>
#include <new>

namespace shoal {

namespace {

extern "C" void release_owner(void* /*data*/, void* hint) {
  delete static_cast<std::shared_ptr<const void>*>(hint);
}

extern "C" void release_buffer(void* /*data*/, void* hint) { PooledBuffer::release(hint); }

}  // namespace

OutgoingMessage::~OutgoingMessage() {
  for (std::size_t i = sent_; i < count_; ++i) {
    zmq_.close_message(&messages_.at(i));
  }
}

bool OutgoingMessage::added(std::size_t bytes) noexcept {
  ++count_;
  bytes_ += bytes;
  return true;
}

bool OutgoingMessage::copy(wire::Frame bytes) noexcept {
  if (zmq_.init_size(&next(), bytes.size()) != 0) {
    return false;
  }
  if (!bytes.empty()) {
    std::memcpy(zmq_.data(&next()), bytes.data(), bytes.size());
  }
  return added(bytes.size());
}

bool OutgoingMessage::share(wire::Frame bytes, const std::shared_ptr<const void>& owner) noexcept {
  auto* const shared = new (std::nothrow) std::shared_ptr<const void>(owner);
  if (shared == nullptr) {
    return false;
  }
  void* const data = const_cast<std::byte*>(bytes.data());  // libzmq only reads it
  if (zmq_.init_data(&next(), data, bytes.size(), release_owner, shared) != 0) {
    delete shared;
    return false;
  }
  return added(bytes.size());
}

bool OutgoingMessage::move(PooledBuffer& buffer) noexcept {
  const std::size_t bytes = buffer.size();
  if (bytes == 0) {
    zmq_.init(&next());
    return added(0);
  }
  std::byte* const data = buffer.data();
  void* const detached = buffer.detach();
  if (zmq_.init_data(&next(), data, bytes, release_buffer, detached) != 0) {
    PooledBuffer::release(detached);
    return false;
  }
  return added(bytes);
}

bool OutgoingMessage::send(void* socket, wire::Frame peer) noexcept {
  if (!peer.empty() && zmq_.send(socket, peer.data(), peer.size(), zmq::kMore | zmq::kDontWait) < 0) {
    return false;
  }
  while (sent_ < count_) {
    const int flags = sent_ + 1 < count_ ? zmq::kMore | zmq::kDontWait : zmq::kDontWait;
    if (zmq_.send_message(&messages_.at(sent_), socket, flags) >= 0) {
      ++sent_;
    } else if (zmq_.error() != EINTR) {
      return false;  // of the first frame, or the context ends
    }
  }
  return true;
}

}  // namespace shoal
