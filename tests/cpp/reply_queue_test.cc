#include "server/reply_queue.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "check.h"

using namespace shoal;

TEST(a_block_has_the_bytes_asked_for_at_a_cache_line) {
  Blocks blocks;
  for (const std::size_t bytes :
       {1UL, 63UL, 64UL, 255UL, 256UL, 257UL, 320UL, 321UL, 511UL, 512UL, 513UL, 4095UL, 4096UL, 4097UL,
        100'000UL, 1UL << 20U, (1UL << 20U) + 1, 5'000'000UL}) {
    const Lease block = blocks.take(bytes);
    CHECK_EQ(block.size(), bytes);
    CHECK_EQ(block.as<double>().size(), bytes / 8);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % kCacheLine, 0);
    std::memset(block.data(), 1, bytes);  // the address sanitizer watches
    CHECK_EQ(blocks.out(), bytes);
  }
  CHECK_EQ(blocks.out(), 0);
}

TEST(no_bytes_are_an_empty_block) {
  Blocks blocks;
  const Lease block = blocks.take(0);
  CHECK_EQ(block.size(), 0);
  CHECK(block.bytes().empty());
  CHECK_EQ(blocks.out(), 0);
}

TEST(a_block_that_came_back_is_handed_out_again) {
  Blocks blocks;
  Lease first = blocks.take(400'000);
  const std::byte* const memory = first.data();
  first = Lease();
  CHECK(blocks.idle() >= 400'000);
  CHECK(blocks.idle() <= 500'000 + 4096);
  const Lease second = blocks.take(399'000);  // of the same class
  CHECK(second.data() == memory);
  CHECK_EQ(blocks.idle(), 0);
}

TEST(blocks_that_are_out_together_share_no_memory) {
  Blocks blocks;
  std::mt19937 random(7);
  std::vector<std::pair<Lease, std::byte>> held;
  for (int i = 0; i < 4000; ++i) {
    if (held.size() > 20 || (!held.empty() && random() % 3 == 0)) {
      const std::size_t which = random() % held.size();
      for (const std::byte byte : held[which].first.bytes()) {
        CHECK(byte == held[which].second);
      }
      std::swap(held[which], held.back());
      held.pop_back();
    } else {
      held.emplace_back(blocks.take(1 + random() % 3000), static_cast<std::byte>(i));
      std::memset(held.back().first.data(), i & 255, held.back().first.size());
    }
  }
}

TEST(no_more_than_agreed_stays_idle) {
  Blocks blocks(100'000);
  {
    std::vector<Lease> held;
    for (int i = 0; i < 40; ++i) {
      held.push_back(blocks.take(10'000));
    }
    CHECK_EQ(blocks.out(), 400'000);
  }
  CHECK_EQ(blocks.out(), 0);
  CHECK(blocks.idle() <= 100'000);
  CHECK(blocks.idle() >= 80'000);
}

TEST(more_than_can_be_is_refused_and_nothing_changes) {
  Blocks blocks;
  bool refused = false;
  try {
    static_cast<void>(blocks.take(~std::size_t{0} / 2));
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused);
  CHECK_EQ(blocks.out(), 0);
}

TEST(memory_given_to_the_transport_may_come_back_last_of_all) {
  auto blocks = std::make_unique<Blocks>();
  Lease block = blocks->take(1000);
  std::memset(block.data(), 3, 1000);
  const std::byte* const memory = block.data();
  void* const given = block.detach();
  CHECK(block.data() == nullptr);
  CHECK_EQ(blocks->out(), 1000);
  blocks.reset();
  CHECK(memory[999] == std::byte{3});
  std::thread([&] { Lease::give_back(given); }).join();
  Lease::give_back(nullptr);
}

TEST(blocks_go_out_in_one_thread_and_come_back_in_others) {
  auto blocks = std::make_unique<Blocks>(1 << 16U);
  std::vector<std::vector<void*>> given(3);
  for (int i = 0; i < 3000; ++i) {
    given[static_cast<std::size_t>(i) % 3].push_back(
        blocks->take(static_cast<std::size_t>(100 + i)).detach());
  }
  std::vector<std::thread> threads;
  threads.reserve(given.size());
  for (const auto& some : given) {
    threads.emplace_back([&some] {
      for (void* const one : some) {
        Lease::give_back(one);
      }
    });
  }
  for (int i = 0; i < 1000; ++i) {
    const Lease block = blocks->take(777);
    std::memset(block.data(), 1, 777);
  }
  blocks.reset();  // while they still come back
  for (auto& thread : threads) {
    thread.join();
  }
}
