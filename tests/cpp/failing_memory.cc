#include "failing_memory.h"

#include <cstdlib>
#include <new>

namespace shoal::check {

thread_local long allocations_left = -1;

}  // namespace shoal::check

// All forms that a delete below may be given memory of: the address sanitizer has its own for the others.
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  long& left = shoal::check::allocations_left;
  return left >= 0 && left-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept { std::free(memory); }
