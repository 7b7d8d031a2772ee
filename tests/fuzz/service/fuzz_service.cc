// libFuzzer's way into a server: make fuzz-service.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "service_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    shoal::service_input::check(std::span(data, size));
  } catch (const shoal::service_input::Broken& broken) {
    std::fprintf(stderr, "does not hold: %s\n", broken.what());
    std::abort();
  }
  return 0;
}
