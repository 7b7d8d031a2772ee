#include "transport/zero_copy_sender.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace shoal {

namespace {

constexpr std::size_t kMaxMessageFrames = 1 + wire::kMaxFrames;  // frames of a message

}  // namespace

// Lives until the sender and all borrowed buffers are gone.
struct ZeroCopySender::Shared {
  std::atomic<std::size_t> users{1};
  std::atomic<std::size_t> borrowed{0};
  std::atomic<BorrowedBuffer*> stack{nullptr};  // a stack: any thread pushes, the sender takes all

  void release() noexcept;
};

struct ZeroCopySender::BorrowedBuffer {
  Shared* shared;
  void* owner;
  BorrowedBuffer* next = nullptr;
};

void ZeroCopySender::drop(BorrowedBuffer* first) noexcept {
  while (first != nullptr) {
    delete std::exchange(first, first->next);
  }
}

void ZeroCopySender::Shared::release() noexcept {
  if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    drop(stack.load(std::memory_order_acquire));
    delete this;
  }
}

// Called by libzmq, in any thread.
void ZeroCopySender::release(void* /*data*/, void* buffer) noexcept {
  auto* const borrowed = static_cast<BorrowedBuffer*>(buffer);
  Shared& shared = *borrowed->shared;
  borrowed->next = shared.stack.load(std::memory_order_relaxed);
  while (!shared.stack.compare_exchange_weak(borrowed->next, borrowed, std::memory_order_release,
                                             std::memory_order_relaxed)) {
  }
  shared.borrowed.fetch_sub(1, std::memory_order_relaxed);
  shared.release();
}

ZeroCopySender::ZeroCopySender(const Zmq& zmq) : zmq_(zmq), shared_(new Shared) {}

ZeroCopySender::~ZeroCopySender() {
  drop(released_);
  shared_->release();
}

// Makes the message of one frame. False: no memory, and the buffer, if there is one, is released.
bool ZeroCopySender::fill(zmq::Message& message, const Frame& frame,
                          std::unique_ptr<BorrowedBuffer>& buffer) noexcept {
  if (buffer == nullptr) {
    if (zmq_.init_size(&message, frame.bytes.size()) != 0) {
      return false;
    }
    if (!frame.bytes.empty()) {
      std::memcpy(zmq_.data(&message), frame.bytes.data(), frame.bytes.size());
    }
    return true;
  }
  shared_->users.fetch_add(1, std::memory_order_relaxed);
  shared_->borrowed.fetch_add(1, std::memory_order_relaxed);
  BorrowedBuffer* const borrowed = buffer.release();
  void* const data = const_cast<std::byte*>(frame.bytes.data());  // libzmq only reads it
  if (zmq_.init_data(&message, data, frame.bytes.size(), &release, borrowed) != 0) {
    release(data, borrowed);
    return false;
  }
  return true;
}

bool ZeroCopySender::send(void* socket, std::span<const Frame> frames) {
  // Everything that may fail for lack of memory comes first: a message that was started must be completed.
  std::array<std::unique_ptr<BorrowedBuffer>, kMaxMessageFrames> buffers;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].owner != nullptr) {
      buffers.at(i) = std::make_unique<BorrowedBuffer>(BorrowedBuffer{shared_, frames[i].owner});
    }
  }
  std::array<zmq::Message, kMaxMessageFrames> messages;
  std::size_t made = 0;
  while (made < frames.size() && fill(messages.at(made), frames[made], buffers.at(made))) {
    ++made;
  }
  std::size_t sent = 0;
  while (made == frames.size() && sent < made) {
    const int flags = sent + 1 < made ? zmq::kMore | zmq::kDontWait : zmq::kDontWait;
    if (zmq_.send_message(&messages.at(sent), socket, flags) >= 0) {
      ++sent;
    } else if (zmq_.error() != EINTR) {
      break;  // only the first frame can be refused, unless the context ends
    }
  }
  for (std::size_t i = sent; i < made; ++i) {
    zmq_.close_message(&messages.at(i));
  }
  // Buffers that no message has taken.
  for (std::unique_ptr<BorrowedBuffer>& buffer : buffers) {
    if (buffer != nullptr) {
      shared_->users.fetch_add(1, std::memory_order_relaxed);
      shared_->borrowed.fetch_add(1, std::memory_order_relaxed);
      release(nullptr, buffer.release());
    }
  }
  return sent == frames.size();
}

void* ZeroCopySender::next_released() noexcept {
  if (released_ == nullptr) {
    released_ = shared_->stack.exchange(nullptr, std::memory_order_acquire);
  }
  if (released_ == nullptr) {
    return nullptr;
  }
  const std::unique_ptr<BorrowedBuffer> buffer(std::exchange(released_, released_->next));
  return buffer->owner;
}

std::size_t ZeroCopySender::borrowed() const noexcept {
  return shared_->borrowed.load(std::memory_order_relaxed);
}

}  // namespace shoal
