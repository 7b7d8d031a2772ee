#include "transport/zero_copy_sender.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace shoal {

namespace {

constexpr std::size_t kMost = 1 + wire::kMaxFrames;  // frames of a message

}  // namespace

// Lives until the courier and all loans have gone.
struct Courier::Home {
  std::atomic<std::size_t> users{1};
  std::atomic<std::size_t> lent{0};
  std::atomic<Loan*> back{nullptr};  // a stack: any thread pushes, the courier takes all

  void leave() noexcept;
};

struct Courier::Loan {
  Home* home;
  void* owner;
  Loan* next = nullptr;
};

void Courier::drop(Loan* first) noexcept {
  while (first != nullptr) {
    delete std::exchange(first, first->next);
  }
}

void Courier::Home::leave() noexcept {
  if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    drop(back.load(std::memory_order_acquire));
    delete this;
  }
}

// As libzmq calls it: in any thread.
void Courier::give_back(void* /*data*/, void* loan) noexcept {
  auto* const given = static_cast<Loan*>(loan);
  Home& home = *given->home;
  given->next = home.back.load(std::memory_order_relaxed);
  while (!home.back.compare_exchange_weak(given->next, given, std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
  home.lent.fetch_sub(1, std::memory_order_relaxed);
  home.leave();
}

Courier::Courier(const Zmq& zmq) : zmq_(zmq), home_(new Home) {}

Courier::~Courier() {
  drop(returned_);
  home_->leave();
}

// A message of one frame; false: no memory, and the loan, if there is one, is given back.
bool Courier::fill(zmq::Message& message, const Frame& frame, std::unique_ptr<Loan>& loan) noexcept {
  if (loan == nullptr) {
    if (zmq_.init_size(&message, frame.bytes.size()) != 0) {
      return false;
    }
    if (!frame.bytes.empty()) {
      std::memcpy(zmq_.data(&message), frame.bytes.data(), frame.bytes.size());
    }
    return true;
  }
  home_->users.fetch_add(1, std::memory_order_relaxed);
  home_->lent.fetch_add(1, std::memory_order_relaxed);
  Loan* const given = loan.release();
  void* const data = const_cast<std::byte*>(frame.bytes.data());  // libzmq only reads it
  if (zmq_.init_data(&message, data, frame.bytes.size(), &give_back, given) != 0) {
    give_back(data, given);
    return false;
  }
  return true;
}

bool Courier::send(void* socket, std::span<const Frame> frames) {
  // All that may fail for lack of memory comes first: a message that was begun must be ended.
  std::array<std::unique_ptr<Loan>, kMost> loans;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    if (frames[i].owner != nullptr) {
      loans.at(i) = std::make_unique<Loan>(Loan{home_, frames[i].owner});
    }
  }
  std::array<zmq::Message, kMost> messages;
  std::size_t made = 0;
  while (made < frames.size() && fill(messages.at(made), frames[made], loans.at(made))) {
    ++made;
  }
  std::size_t sent = 0;
  while (made == frames.size() && sent < made) {
    const int flags = sent + 1 < made ? zmq::kMore | zmq::kDontWait : zmq::kDontWait;
    if (zmq_.send_message(&messages.at(sent), socket, flags) >= 0) {
      ++sent;
    } else if (zmq_.error() != EINTR) {
      break;  // only the first is ever refused, unless the context ends
    }
  }
  for (std::size_t i = sent; i < made; ++i) {
    zmq_.close_message(&messages.at(i));
  }
  // What came to no message.
  for (std::unique_ptr<Loan>& loan : loans) {
    if (loan != nullptr) {
      home_->users.fetch_add(1, std::memory_order_relaxed);
      home_->lent.fetch_add(1, std::memory_order_relaxed);
      give_back(nullptr, loan.release());
    }
  }
  return sent == frames.size();
}

void* Courier::returned() noexcept {
  if (returned_ == nullptr) {
    returned_ = home_->back.exchange(nullptr, std::memory_order_acquire);
  }
  if (returned_ == nullptr) {
    return nullptr;
  }
  const std::unique_ptr<Loan> loan(std::exchange(returned_, returned_->next));
  return loan->owner;
}

std::size_t Courier::lent() const noexcept { return home_->lent.load(std::memory_order_relaxed); }

}  // namespace shoal
