// ZeroCopySender: each borrowed buffer is released once, whatever happens to its message.

#include "transport/zero_copy_sender.h"

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_zmq.h"

using namespace shoal;

namespace {

struct World {
  World() { fake.is_router = false; }

  // Owners that were released since the last call.
  std::multiset<void*> released() {
    std::multiset<void*> all;
    for (void* owner = sender->next_released(); owner != nullptr; owner = sender->next_released()) {
      all.insert(owner);
    }
    return all;
  }
  bool send(std::vector<ZeroCopySender::Frame> frames) { return sender->send(this, frames); }

  Fake fake;
  std::unique_ptr<ZeroCopySender> sender = std::make_unique<ZeroCopySender>(Fake::functions());
  Bytes small = Bytes(64, std::byte{1});
  Bytes hashes = Bytes(80'000, std::byte{2});
  Bytes values = Bytes(40'000, std::byte{3});
};

TEST(a_borrowed_frame_is_sent_in_place_and_released_when_the_transport_is_done) {
  World world;
  CHECK(world.send({{world.small}, {world.hashes, &world.hashes}, {world.values, &world.values}}));
  CHECK(world.released().empty());
  CHECK_EQ(world.sender->borrowed(), 2);
  // Not a copy: a change by the owner is sent.
  world.values[7] = std::byte{9};
  const auto sent = world.fake.take();
  CHECK_EQ(sent.size(), 1);
  CHECK(sent[0] == (Frames{world.small, world.hashes, world.values}));
  CHECK(world.released() == (std::multiset<void*>{&world.hashes, &world.values}));
  CHECK(world.released().empty());
  CHECK_EQ(world.sender->borrowed(), 0);
}

TEST(a_message_that_the_socket_refuses_releases_all_owners) {
  World world;
  world.fake.refuse_peer = EAGAIN;
  CHECK(!world.send({{world.small}, {world.hashes, &world.hashes}, {world.values, &world.values}}));
  CHECK(world.released() == (std::multiset<void*>{&world.hashes, &world.values}));
  CHECK(world.fake.take().empty());
}

TEST(a_message_without_memory_releases_all_owners_at_whichever_frame) {
  for (int left = 0; left < 3; ++left) {
    World world;
    world.fake.memory_left = left;
    CHECK(!world.send({{world.small}, {world.hashes, &world.hashes}, {world.values, &world.values}}));
    CHECK(world.released() == (std::multiset<void*>{&world.hashes, &world.values}));
    CHECK_EQ(world.sender->borrowed(), 0);
    CHECK(world.fake.take().empty());
  }
}

TEST(a_signal_between_frames_changes_nothing) {
  World world;
  world.fake.interruptions = 5;
  CHECK(world.send({{world.small}, {world.values, &world.values}}));
  CHECK(world.fake.take() == (std::vector<Frames>{{world.small, world.values}}));
  world.fake.arrive({world.small, world.hashes});
  world.fake.interruptions = 3;
  MultipartMessage parts(Fake::functions());
  CHECK(parts.receive(&world) == MultipartMessage::Result::kMessage);
  CHECK_EQ(parts.count(), 2);
  CHECK_EQ(parts.bytes(), world.small.size() + world.hashes.size());
  CHECK(parts.receive(&world) == MultipartMessage::Result::kNone);
  CHECK_EQ(parts.bytes(), 0);
}

TEST(frames_are_released_in_other_threads_while_more_are_sent) {
  World world;
  std::vector<int> owners(400);
  std::multiset<void*> back;
  std::atomic<bool> done{false};
  std::thread transport([&] {
    while (!done.load()) {
      world.fake.take();
    }
  });
  for (int& owner : owners) {
    CHECK(world.send({{world.small}, {world.values, &owner}}));
    back.merge(world.released());
  }
  done = true;
  transport.join();
  world.fake.take();
  back.merge(world.released());
  CHECK_EQ(back.size(), owners.size());
  for (int& owner : owners) {
    CHECK_EQ(back.count(&owner), 1);
  }
}

TEST(what_is_borrowed_when_the_sender_ends_is_not_returned) {
  World world;
  CHECK(world.send({{world.small}, {world.values, &world.values}}));
  CHECK(world.send({{world.hashes, &world.hashes}}));
  world.sender.reset();
  CHECK_EQ(world.fake.take().size(), 2);  // and nothing leaks, or is accessed beyond its end
}

TEST(a_message_of_too_many_frames_is_read_to_its_end) {
  World world;
  world.fake.arrive(Frames(MultipartMessage::kMaxFrames + 40, world.small));
  world.fake.arrive({world.hashes});
  MultipartMessage parts(Fake::functions());
  CHECK(parts.receive(&world) == MultipartMessage::Result::kMessage);
  CHECK_EQ(parts.count(), MultipartMessage::kMaxFrames);
  CHECK_EQ(parts.bytes(), (MultipartMessage::kMaxFrames + 40) * world.small.size());
  CHECK(parts.receive(&world) == MultipartMessage::Result::kMessage);
  CHECK_EQ(parts.count(), 1);
  CHECK_EQ(parts.frame(0).size(), world.hashes.size());
}

}  // namespace
