// libFuzzer's way into a backup: make fuzz-copies.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "copies_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    shoal::copies_input::check(std::span(data, size));
  } catch (const shoal::copies_input::Broken& broken) {
    std::fprintf(stderr, "does not hold: %s\n", broken.what());
    std::abort();
  }
  return 0;
}
