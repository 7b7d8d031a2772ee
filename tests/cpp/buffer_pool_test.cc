#include "transport/buffer_pool.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "check.h"

namespace shoal::buffer_pool_test {

TEST(a_block_has_the_bytes_asked_for_at_a_cache_line) {
  BufferPool pool;
  for (const std::size_t bytes :
       {1UL, 63UL, 64UL, 255UL, 256UL, 257UL, 320UL, 321UL, 511UL, 512UL, 513UL, 4095UL, 4096UL, 4097UL,
        100'000UL, 1UL << 20U, (1UL << 20U) + 1, 5'000'000UL}) {
    const PooledBuffer block = pool.acquire(bytes);
    CHECK_EQ(block.size(), bytes);
    CHECK_EQ(block.as<double>().size(), bytes / 8);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % kCacheLine, 0);
    std::memset(block.data(), 1, bytes);  // the address sanitizer watches
    CHECK_EQ(pool.used_bytes(), bytes);
  }
  CHECK_EQ(pool.used_bytes(), 0);
}

TEST(no_bytes_are_an_empty_block) {
  BufferPool pool;
  const PooledBuffer block = pool.acquire(0);
  CHECK_EQ(block.size(), 0);
  CHECK(block.bytes().empty());
  CHECK_EQ(pool.used_bytes(), 0);
}

TEST(a_block_that_came_back_is_handed_out_again) {
  BufferPool pool;
  PooledBuffer first = pool.acquire(400'000);
  const std::byte* const memory = first.data();
  first = PooledBuffer();
  CHECK(pool.idle_bytes() >= 400'000);
  CHECK(pool.idle_bytes() <= 500'000 + 4096);
  const PooledBuffer second = pool.acquire(399'000);  // of the same class
  CHECK(second.data() == memory);
  CHECK_EQ(pool.idle_bytes(), 0);
}

TEST(blocks_that_are_out_together_share_no_memory) {
  BufferPool pool;
  std::mt19937 random(7);
  std::vector<std::pair<PooledBuffer, std::byte>> held;
  for (int i = 0; i < 4000; ++i) {
    if (held.size() > 20 || (!held.empty() && random() % 3 == 0)) {
      const std::size_t which = random() % held.size();
      for (const std::byte byte : held[which].first.bytes()) {
        CHECK(byte == held[which].second);
      }
      std::swap(held[which], held.back());
      held.pop_back();
    } else {
      held.emplace_back(pool.acquire(1 + random() % 3000), static_cast<std::byte>(i));
      std::memset(held.back().first.data(), i & 255, held.back().first.size());
    }
  }
}

TEST(no_more_than_agreed_stays_idle) {
  BufferPool pool(100'000);
  {
    std::vector<PooledBuffer> held;
    for (int i = 0; i < 40; ++i) {
      held.push_back(pool.acquire(10'000));
    }
    CHECK_EQ(pool.used_bytes(), 400'000);
  }
  CHECK_EQ(pool.used_bytes(), 0);
  CHECK(pool.idle_bytes() <= 100'000);
  CHECK(pool.idle_bytes() >= 80'000);
}

TEST(more_than_can_be_is_refused_and_nothing_changes) {
  BufferPool pool;
  bool refused = false;
  try {
    static_cast<void>(pool.acquire(~std::size_t{0} / 2));
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused);
  CHECK_EQ(pool.used_bytes(), 0);
}

TEST(memory_given_to_the_transport_may_come_back_last_of_all) {
  auto pool = std::make_unique<BufferPool>();
  PooledBuffer block = pool->acquire(1000);
  std::memset(block.data(), 3, 1000);
  const std::byte* const memory = block.data();
  void* const given = block.detach();
  CHECK(block.data() == nullptr);
  CHECK_EQ(pool->used_bytes(), 1000);
  pool.reset();
  CHECK(memory[999] == std::byte{3});
  std::thread([&] { PooledBuffer::release(given); }).join();
  PooledBuffer::release(nullptr);
}

TEST(blocks_go_out_in_one_thread_and_come_back_in_others) {
  auto pool = std::make_unique<BufferPool>(1 << 16U);
  std::vector<std::vector<void*>> given(3);
  for (int i = 0; i < 3000; ++i) {
    given[static_cast<std::size_t>(i) % 3].push_back(
        pool->acquire(static_cast<std::size_t>(100 + i)).detach());
  }
  std::vector<std::thread> threads;
  threads.reserve(given.size());
  for (const auto& some : given) {
    threads.emplace_back([&some] {
      for (void* const one : some) {
        PooledBuffer::release(one);
      }
    });
  }
  for (int i = 0; i < 1000; ++i) {
    const PooledBuffer block = pool->acquire(777);
    std::memset(block.data(), 1, 777);
  }
  pool.reset();  // while they still come back
  for (auto& thread : threads) {
    thread.join();
  }
}

}  // namespace shoal::buffer_pool_test
