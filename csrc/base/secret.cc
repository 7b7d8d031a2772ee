#include "base/secret.h"

#include <sys/random.h>

#include <chrono>

#include "base/mix.h"

namespace shoal {

namespace {

std::uint64_t draw() noexcept {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof bits)) {
    // A kernel that has just booted, or has none to give: where this process lies and when it began.
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
