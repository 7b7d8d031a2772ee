// libFuzzer's way into the decoder of the wire format: make fuzz-wire.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "wire_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  bool good = false;
  const char* const broken = shoal::wire::check_input(std::as_bytes(std::span(data, size)), good);
  if (*broken != '\0') {
    std::fprintf(stderr, "does not hold: %s\n", broken);
    std::abort();
  }
  return 0;
}
