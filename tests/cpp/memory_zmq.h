// A libzmq in memory for clients: DEALER sockets whose messages a service answers in a thread of its own.
//
// As that of libzmq, the file of a socket is readable after something has arrived until the socket is used:
// also a send may take the signal away, so a sleep on the file is only allowed after a receive that found
// nothing. Messages can be lost, both ways.

#pragma once

#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "endpoint/endpoint.h"
#include "endpoint/reply_queue.h"
#include "transport/event_fd.h"
#include "transport/zmq.h"

namespace shoal {

class MemoryZmq {
 public:
  using Bytes = std::vector<std::byte>;
  using Frames = std::vector<Bytes>;

  // `services`: of the addresses "memory://0", "memory://1", ... `lost`: of so many messages one, 0: none.
  MemoryZmq(std::vector<Endpoint*> services, unsigned lost) : services_(std::move(services)), lost_(lost) {
    current = this;
    thread_ = std::thread([this] { serve(); });
  }
  ~MemoryZmq() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
    CHECK(sockets_.empty());
    current = nullptr;
  }
  MemoryZmq(const MemoryZmq&) = delete;
  MemoryZmq& operator=(const MemoryZmq&) = delete;

  // Answers nothing until it is resumed.
  void pause(bool paused) {
    const std::lock_guard lock(mutex_);
    paused_ = paused;
    changed_.notify_all();
  }
  // Has the services answer what they have put off.
  void released() {
    const std::lock_guard lock(mutex_);
    is_released_ = true;
    changed_.notify_all();
  }

  static Zmq functions();

 private:
  struct Content {
    Bytes own;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool more = false;
    void (*free)(void*, void*) = nullptr;
    void* hint = nullptr;
  };
  struct Socket {
    EventFd signal{"a test"};
    bool is_dealer = true;
    std::size_t service = 0;
    std::deque<Frames> incoming;
    Frames reading;
    Frames sending;
  };
  struct Request {
    Socket* from;
    std::size_t service;
    Frames frames;
  };

  static Content*& of(zmq::Message* message) { return *reinterpret_cast<Content**>(message->bytes); }
  static Content* of(const zmq::Message* message) {
    return *reinterpret_cast<Content* const*>(message->bytes);
  }
  static void drop(Content* content) {
    if (content != nullptr && content->free != nullptr) {
      content->free(content->data, content->hint);
    }
    delete content;
  }

  void serve() {
    BufferPool pool;
    ReplyQueue replies(pool);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || is_released_ || (!requests_.empty() && !paused_); });
      if (stopped_) {
        return;
      }
      std::size_t service = 0;
      if (std::exchange(is_released_, false)) {
        for (Endpoint* const one : services_) {
          one->released(replies);
        }
      }
      if (!requests_.empty() && !paused_) {
        const Request request = std::move(requests_.front());
        requests_.pop_front();
        service = request.service;
        const std::vector<wire::Frame> views(request.frames.begin(), request.frames.end());
        const std::string peer(reinterpret_cast<const char*>(&request.from), sizeof(Socket*));
        lock.unlock();
        services_[service]->handle(peer, views, replies);
        services_[service]->acknowledge(replies);
        lock.lock();
      }
      for (Reply& reply : replies.replies()) {
        Socket* to = nullptr;
        std::memcpy(&to, reply.peer.data(), sizeof to);
        if (!sockets_.contains(to) || is_lost()) {
          continue;
        }
        Frames& frames = to->incoming.emplace_back();
        frames.emplace_back(reply.header.begin(), reply.header.end());
        for (std::size_t i = 0; i < reply.frames; ++i) {
          const auto bytes = reply.payload.at(i).bytes();
          frames.emplace_back(bytes.begin(), bytes.end());
        }
        to->signal.signal();
      }
      replies.replies().clear();
    }
  }

  bool is_lost() { return lost_ != 0 && random_() % lost_ == 0; }

  static inline MemoryZmq* current = nullptr;
  static inline thread_local int error = 0;

  static int fail(int number) {
    error = number;
    return -1;
  }

  const std::vector<Endpoint*> services_;
  const unsigned lost_;
  std::mt19937 random_{7};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Socket*> sockets_;
  std::deque<Request> requests_;
  bool stopped_ = false;
  bool paused_ = false;
  bool is_released_ = false;
  std::thread thread_;
};

inline Zmq MemoryZmq::functions() {
  Zmq zmq{};
  zmq.error = [] { return error; };
  zmq.error_text = [](int) -> const char* { return "an error"; };
  zmq.socket = [](void*, int type) -> void* {
    auto* const made = new Socket;
    made->is_dealer = type == zmq::kDealer;
    const std::lock_guard lock(current->mutex_);
    current->sockets_.insert(made);
    return made;
  };
  zmq.close = [](void* socket) {
    {
      const std::lock_guard lock(current->mutex_);
      auto* const closed = static_cast<Socket*>(socket);
      current->sockets_.erase(closed);
      std::erase_if(current->requests_, [&](const Request& request) { return request.from == closed; });
    }
    delete static_cast<Socket*>(socket);
    return 0;
  };
  zmq.set = [](void*, int, const void*, std::size_t) { return 0; };
  zmq.get = [](void* socket, int option, void* value, std::size_t*) {
    CHECK_EQ(option, zmq::kFile);
    const int file = static_cast<Socket*>(socket)->signal.file();
    std::memcpy(value, &file, sizeof file);
    return 0;
  };
  zmq.monitor = [](void*, const char*, int) { return 0; };
  zmq.connect = [](void* socket, const char* address) {
    auto* const made = static_cast<Socket*>(socket);
    if (made->is_dealer) {
      made->service =
          static_cast<std::size_t>(std::stoi(std::string(address).substr(std::strlen("memory://"))));
    }
    return 0;
  };
  zmq.init = [](zmq::Message* message) {
    of(message) = nullptr;
    return 0;
  };
  zmq.init_size = [](zmq::Message* message, std::size_t bytes) {
    Content* const content = of(message) = new Content;
    content->own.resize(bytes);
    content->data = content->own.data();
    content->bytes = bytes;
    return 0;
  };
  zmq.init_data = [](zmq::Message* message, void* data, std::size_t bytes, void (*free)(void*, void*),
                     void* hint) {
    Content* const content = of(message) = new Content;
    content->data = static_cast<std::byte*>(data);
    content->bytes = bytes;
    content->free = free;
    content->hint = hint;
    return 0;
  };
  zmq.receive_message = [](zmq::Message* message, void* socket, int) {
    auto* const from = static_cast<Socket*>(socket);
    const std::lock_guard lock(current->mutex_);
    from->signal.drain();
    if (from->reading.empty()) {
      if (from->incoming.empty()) {
        return fail(EAGAIN);
      }
      from->reading = std::move(from->incoming.front());
      from->incoming.pop_front();
    }
    Content* const content = of(message) = new Content;
    content->own = std::move(from->reading.front());
    from->reading.erase(from->reading.begin());
    content->data = content->own.data();
    content->bytes = content->own.size();
    content->more = !from->reading.empty();
    return static_cast<int>(content->bytes);
  };
  zmq.send_message = [](zmq::Message* message, void* socket, int flags) {
    auto* const to = static_cast<Socket*>(socket);
    Content* const content = std::exchange(of(message), nullptr);
    const std::lock_guard lock(current->mutex_);
    to->signal.drain();
    to->sending.emplace_back(content->data, content->data + content->bytes);
    const int bytes = static_cast<int>(content->bytes);
    drop(content);
    if ((flags & zmq::kMore) == 0) {
      Frames frames = std::exchange(to->sending, {});
      if (!current->is_lost()) {
        current->requests_.push_back({to, to->service, std::move(frames)});
        current->changed_.notify_all();
      }
    }
    return bytes;
  };
  zmq.close_message = [](zmq::Message* message) {
    drop(std::exchange(of(message), nullptr));
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
