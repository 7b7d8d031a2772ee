#include "failing_memory.h"

#include <cstdlib>
#include <new>

namespace shoal::check {

thread_local long allocations_left = -1;

}  // namespace shoal::check

void* operator new(std::size_t bytes) {
  long& left = shoal::check::allocations_left;
  void* const memory = left >= 0 && left-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
