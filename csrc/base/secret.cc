#include "base/secret.h"

#include <sys/random.h>

#include <chrono>

#include "base/mix.h"

namespace shoal {

namespace {

std::uint64_t draw() noexcept {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof bits)) {
    // If the kernel has no random bits yet, or provides none: the time and an address of this process.
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    bits = mix(static_cast<std::uint64_t>(now)) ^ mix(reinterpret_cast<std::uintptr_t>(&bits));
  }
  return bits | 1U;
}

}  // namespace

std::uint64_t process_secret() noexcept {
  static const std::uint64_t secret = draw();
  return secret;
}

}  // namespace shoal
