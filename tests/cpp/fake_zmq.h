// A fake libzmq in memory, with one socket, whose functions can be made to fail.

#pragma once

#include <poll.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/zmq.h"

namespace shoal {

using Bytes = std::vector<std::byte>;
using Frames = std::vector<Bytes>;

// One socket of a libzmq. Sent messages are kept until the test takes them, as if the I/O thread had not sent
// them yet.
class Fake {
 public:
  // The contents of a zmq::Message.
  struct Content {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool more = false;
    int references = 1;
    void (*free)(void*, void*) = nullptr;
    void* hint = nullptr;
    Bytes own;
  };

  Fake() { current = this; }
  ~Fake() {
    take();
    current = nullptr;
    CHECK_EQ(live, 0);
    CHECK_EQ(sockets, 0);
  }
  Fake(const Fake&) = delete;
  Fake& operator=(const Fake&) = delete;

  static Zmq functions();

  void arrive(Frames frames) {
    const std::lock_guard lock(mutex);
    incoming.push_back(std::move(frames));
    changed.notify_all();
  }
  // Waits for that many complete messages, as [peer, frames...].
  std::vector<Frames> wait(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return outgoing.size() >= count; });
    CHECK_EQ(outgoing.size(), count);
    return copies();
  }
  // Returns the sent messages and releases their memory.
  std::vector<Frames> take() {
    std::vector<std::vector<Content*>> taken;
    std::vector<Frames> copied;
    {
      const std::lock_guard lock(mutex);
      copied = copies();
      taken.swap(outgoing);
    }
    for (auto& message : taken) {
      for (Content* const content : message) {
        drop(content);
      }
    }
    return copied;
  }
  void drop(Content* content) {
    if (content != nullptr && --content->references == 0) {
      if (content->free != nullptr) {
        content->free(content->data, content->hint);
      }
      delete content;
      --live;
    }
  }
  void check_thread() {
    const std::lock_guard lock(mutex);
    if (owner == std::thread::id()) {
      owner = std::this_thread::get_id();
    }
    CHECK(owner == std::this_thread::get_id());
  }
  std::vector<Frames> copies() const {
    std::vector<Frames> all;
    for (const auto& message : outgoing) {
      Frames& frames = all.emplace_back();
      for (const Content* const content : message) {
        frames.emplace_back(content->data, content->data + content->bytes);
      }
    }
    return all;
  }

  static inline Fake* current = nullptr;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Frames> incoming;
  Frames reading;  // the remaining frames of the message that is being received
  std::vector<std::vector<Content*>> outgoing;
  std::vector<Content*> sending;  // an incomplete message
  std::atomic<int> live{0};
  std::atomic<int> sockets{0};
  std::atomic<bool> terminated{false};
  std::atomic<int> refuse_bind{0};  // errors, 0 for none
  std::atomic<int> refuse_socket{0};
  std::atomic<int> refuse_peer{0};           // at a message's first part
  std::atomic<int> memory_left{1 << 30U};    // messages until there is no memory
  std::atomic<int> interruptions{0};         // by signals, before anything is sent or received
  std::atomic<std::size_t> misalignment{0};  // of the memory of received frames, in bytes
  bool is_router = true;                     // a message begins with a peer's name
  std::thread::id owner;
};

inline thread_local int error = 0;

inline int fail(int number) {
  error = number;
  return -1;
}

inline Fake::Content*& of(zmq::Message* message) {
  return *reinterpret_cast<Fake::Content**>(message->bytes);
}
inline Fake::Content* of(const zmq::Message* message) {
  return *reinterpret_cast<Fake::Content* const*>(message->bytes);
}

inline Fake::Content* make() {
  ++Fake::current->live;
  return new Fake::Content;
}

// A part of a message: the first is a peer's name.
inline int put(Fake::Content* content, int flags) {
  Fake& fake = *Fake::current;
  const std::lock_guard lock(fake.mutex);
  fake.sending.push_back(content);
  if ((flags & zmq::kMore) == 0) {
    fake.outgoing.push_back(std::exchange(fake.sending, {}));
    fake.changed.notify_all();
  }
  return static_cast<int>(content->bytes);
}

inline Zmq Fake::functions() {
  Zmq zmq{};
  zmq.version = [](int* major, int* minor, int* patch) { *major = 4, *minor = 3, *patch = 5; };
  zmq.error = [] { return error; };
  zmq.error_text = [](int number) -> const char* { return number == EADDRINUSE ? "in use" : "other"; };
  zmq.socket = [](void* context, int type) -> void* {
    CHECK_EQ(type, zmq::kRouter);
    current->check_thread();
    if (current->refuse_socket != 0) {
      error = current->refuse_socket;
      return nullptr;
    }
    ++current->sockets;
    return context;
  };
  zmq.close = [](void*) {
    current->check_thread();
    --current->sockets;
    return 0;
  };
  zmq.set = [](void*, int, const void*, std::size_t) {
    current->check_thread();
    return 0;
  };
  zmq.get = [](void*, int option, void* value, std::size_t*) {
    CHECK_EQ(option, zmq::kLastEndpoint);
    std::strcpy(static_cast<char*>(value), "fake://bound");
    return 0;
  };
  zmq.bind = [](void*, const char*) { return current->refuse_bind == 0 ? 0 : fail(current->refuse_bind); };
  zmq.poll = [](zmq::PollItem* items, int count, long timeout_ms) {
    CHECK_EQ(count, 2);
    CHECK_EQ(timeout_ms, -1);
    current->check_thread();
    for (;;) {
      {
        const std::lock_guard lock(current->mutex);
        if (current->terminated) {
          return fail(zmq::kErrorTerminated);
        }
        items[0].revents = current->incoming.empty() ? short{0} : zmq::kPollIn;
      }
      pollfd bell{items[1].fd, POLLIN, 0};
      items[1].revents = ::poll(&bell, 1, 0) > 0 ? zmq::kPollIn : short{0};
      if (items[0].revents != 0 || items[1].revents != 0) {
        return 1;
      }
      std::this_thread::yield();
    }
  };
  zmq.send = [](void*, const void* data, std::size_t bytes, int flags) {
    current->check_thread();
    CHECK((flags & zmq::kDontWait) != 0);
    CHECK(current->sending.empty());  // only peers' names go this way
    if (current->terminated) {
      return fail(zmq::kErrorTerminated);
    }
    if (current->refuse_peer != 0) {
      return fail(current->refuse_peer);
    }
    Content* const content = make();
    const auto* const begin = static_cast<const std::byte*>(data);
    content->own.assign(begin, begin + bytes);
    content->data = content->own.data();
    content->bytes = bytes;
    return put(content, flags);
  };
  zmq.init = [](zmq::Message* message) {
    of(message) = nullptr;
    return 0;
  };
  zmq.init_size = [](zmq::Message* message, std::size_t bytes) {
    if (current->memory_left-- <= 0) {
      return fail(ENOMEM);
    }
    Content* const content = of(message) = make();
    content->own.resize(bytes);
    content->data = content->own.data();
    content->bytes = bytes;
    return 0;
  };
  zmq.init_data = [](zmq::Message* message, void* data, std::size_t bytes, void (*free)(void*, void*),
                     void* hint) {
    if (current->memory_left-- <= 0) {
      return fail(ENOMEM);
    }
    Content* const content = of(message) = make();
    content->data = static_cast<std::byte*>(data);
    content->bytes = bytes;
    content->free = free;
    content->hint = hint;
    return 0;
  };
  zmq.receive_message = [](zmq::Message* message, void*, int flags) {
    current->check_thread();
    CHECK_EQ(flags, zmq::kDontWait);
    if (current->interruptions > 0) {
      --current->interruptions;
      return fail(EINTR);
    }
    const std::lock_guard lock(current->mutex);
    if (current->terminated) {
      return fail(zmq::kErrorTerminated);
    }
    if (current->reading.empty()) {
      if (current->incoming.empty()) {
        return fail(EAGAIN);
      }
      current->reading = std::move(current->incoming.front());
      current->incoming.pop_front();
    }
    Content* const content = of(message) = make();
    content->own = std::move(current->reading.front());
    current->reading.erase(current->reading.begin());
    content->bytes = content->own.size();
    content->own.insert(content->own.begin(), current->misalignment, std::byte{0});
    content->data = content->own.data() + current->misalignment;
    content->more = !current->reading.empty();
    return static_cast<int>(content->bytes);
  };
  zmq.send_message = [](zmq::Message* message, void*, int flags) {
    current->check_thread();
    CHECK((flags & zmq::kDontWait) != 0);
    CHECK(!current->is_router || !current->sending.empty());
    if (current->interruptions > 0) {
      --current->interruptions;
      return fail(EINTR);
    }
    if (current->refuse_peer != 0 && !current->is_router) {
      return fail(current->refuse_peer);
    }
    if (of(message) == nullptr) {
      of(message) = make();
    }
    return put(std::exchange(of(message), nullptr), flags);
  };
  zmq.copy_message = [](zmq::Message* to, zmq::Message* from) {
    current->drop(std::exchange(of(to), nullptr));
    if (of(from) != nullptr) {
      ++of(from)->references;
      of(to) = of(from);
    }
    return 0;
  };
  zmq.move_message = [](zmq::Message* to, zmq::Message* from) {
    current->drop(std::exchange(of(to), std::exchange(of(from), nullptr)));
    return 0;
  };
  zmq.close_message = [](zmq::Message* message) {
    current->drop(std::exchange(of(message), nullptr));
    return 0;
  };
  zmq.data = [](zmq::Message* message) -> void* {
    return of(message) == nullptr ? nullptr : of(message)->data;
  };
  zmq.size = [](const zmq::Message* message) { return of(message) == nullptr ? 0 : of(message)->bytes; };
  zmq.more = [](const zmq::Message* message) { return of(message) != nullptr && of(message)->more ? 1 : 0; };
  return zmq;
}

}  // namespace shoal
