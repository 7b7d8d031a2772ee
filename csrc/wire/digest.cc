#include "wire/digest.h"

#include <bit>
#include <cstring>

namespace shoal {

namespace {

constexpr std::uint64_t finish(std::uint64_t x) noexcept {
  x = (x ^ (x >> 33U)) * 0xff51afd7ed558ccdU;
  x = (x ^ (x >> 33U)) * 0xc4ceb9fe1a85ec53U;
  return x ^ (x >> 33U);
}

}  // namespace

Digest Digest::read(std::span<const std::byte> bytes) noexcept {
  Digest digest;
  std::memcpy(&digest.first, bytes.data(), sizeof digest.first);
  std::memcpy(&digest.second, bytes.data() + sizeof digest.first, sizeof digest.second);
  return digest;
}

Digest digest(std::span<const std::uint64_t> hashes, std::uint32_t seed) noexcept {
  constexpr std::uint64_t kFirst = 0x87c37b91114253d5U;
  constexpr std::uint64_t kSecond = 0x4cf5ad432745937fU;
  const auto mix_first = [](std::uint64_t word) { return std::rotl(word * kFirst, 31) * kSecond; };
  const auto mix_second = [](std::uint64_t word) { return std::rotl(word * kSecond, 33) * kFirst; };
  std::uint64_t a = seed;
  std::uint64_t b = seed;
  std::size_t i = 0;
  for (; i + 2 <= hashes.size(); i += 2) {
    a ^= mix_first(hashes[i]);
    a = (std::rotl(a, 27) + b) * 5 + 0x52dce729U;
    b ^= mix_second(hashes[i + 1]);
    b = (std::rotl(b, 31) + a) * 5 + 0x38495ab5U;
  }
  if (i < hashes.size()) {
    a ^= mix_first(hashes[i]);
  }
  a ^= hashes.size_bytes();
  b ^= hashes.size_bytes();
  a += b;
  b += a;
  a = finish(a);
  b = finish(b);
  a += b;
  b += a;
  return {a, b};
}

}  // namespace shoal
