#include "policy/bloom.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "base/prefetch.h"

namespace shoal {

namespace {

constexpr std::uint32_t kNarrowMost = 15;
constexpr std::uint32_t kWideMost = 255;

// The probability that a new key finds all its counters raised, in lines of `counters` counters with `keys`
// keys on average. Keys per line follow a Poisson distribution. Uses basic operations only, so that the
// filter has the same size on every machine.
double chance(std::size_t counters, double keys, std::size_t hashes) noexcept {
  constexpr std::uint32_t kSteps = std::uint32_t{1} << 20U;
  double weight = power(1 - keys / kSteps, kSteps);  // e^-keys
  double total = 0;
  const double kept = power(1 - 1 / static_cast<double>(counters), static_cast<std::uint32_t>(hashes));
  double empty = 1;  // probability that a counter is 0 in a line of j keys
  for (int j = 0; j < 4096 && (j < 2 * keys || weight > 1e-12); ++j) {
    total += weight * power(1 - empty, static_cast<std::uint32_t>(hashes));
    weight *= keys / (j + 1);
    empty *= kept;
  }
  return total;
}

}  // namespace

BloomShape::BloomShape(const Admission& rule) : lines_per_unit_(1), hashes_(1), wide_(rule.n > kNarrowMost) {
  const std::size_t counters = kCacheLine * (wide_ ? 1 : 2);
  // Counters per key, in eighths.
  std::size_t eighths = 8;
  for (bool found = false; !found; ++eighths) {
    for (std::size_t k = 1; k <= kMaxHashes && !found; ++k) {
      const double keys = static_cast<double>(counters) * 8 / static_cast<double>(eighths);
      if (chance(counters, keys, k) <= rule.error) {
        hashes_ = k;
        found = true;
      }
    }
  }
  --eighths;
  const double lines =
      static_cast<double>(rule.capacity) * static_cast<double>(eighths) / (8 * static_cast<double>(counters));
  lines_per_unit_ = static_cast<std::size_t>(std::max(1.0, std::ceil(lines / static_cast<double>(kUnits))));
}

std::byte* Bloom::line(std::uint64_t hash) const noexcept {
  return const_cast<std::byte*>(lines_.data()) + (shape_->line_of(hash) - first_line_) * kCacheLine;
}

void Bloom::prefetch(std::uint64_t hash) const noexcept {
  if (lines_.bytes() != 0) {
    shoal::prefetch(line(hash));
  }
}

void Bloom::turn_to(std::uint32_t window) noexcept {
  if (age_at(window, window_) != 0) {
    window_ = window;
    if (before_ != nullptr && !before_->anew) {
      try {
        Region blank(lines_.bytes());
        before_->lines = std::exchange(lines_, std::move(blank));
        before_->anew = true;
        return;
      } catch (const std::bad_alloc&) {
        *lost_ = true;
      }
    }
    lines_.forget(0);
  }
}

bool Bloom::ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept {
  if (count >= n_) {
    return true;
  }
  if (within_ != 0) {
    turn_to(now / within_);
  }
  std::byte* const at = line(hash);
  // The high bits of the product depend on all bits of the hash, and mostly on those that did not choose the
  // line.
  std::uint64_t bits = (hash * 0x9e3779b97f4a7c15U) >> 8U;
  std::array<std::uint8_t, BloomShape::kMaxHashes> places;
  std::uint32_t least = kWideMost;
  for (std::size_t k = 0; k < shape_->hashes(); ++k, bits >>= 7U) {
    places[k] = static_cast<std::uint8_t>(bits & (shape_->wide() ? 63U : 127U));
    const auto byte = std::to_integer<std::uint32_t>(at[shape_->wide() ? places[k] : places[k] / 2]);
    least = std::min(least, shape_->wide() ? byte : (places[k] % 2 == 0 ? byte & 15U : byte >> 4U));
  }
  const std::uint32_t new_count = least + count;
  if (new_count >= n_) {
    return true;
  }
  for (std::size_t k = 0; k < shape_->hashes(); ++k) {
    if (shape_->wide()) {
      std::byte& counter = at[places[k]];
      counter = std::max(counter, static_cast<std::byte>(new_count));
    } else {
      std::byte& pair = at[places[k] / 2];
      const unsigned shift = places[k] % 2 == 0 ? 0 : 4;
      const auto before = std::to_integer<std::uint32_t>(pair);
      const std::uint32_t raised = std::max((before >> shift) & 15U, new_count);
      pair = static_cast<std::byte>((before & ~(15U << shift)) | (raised << shift));
    }
  }
  return false;
}

void Bloom::sweep(std::uint32_t now) noexcept {
  if (within_ != 0) {
    turn_to(now / within_);
  }
}

void Bloom::save(std::vector<std::byte>& bytes) const {
  if (lines_.bytes() == 0) {
    return;
  }
  bytes.resize(kHead + bytes_);
  std::memcpy(bytes.data(), &window_, sizeof window_);
  std::memcpy(bytes.data() + kHead, lines_.data(), bytes_);
}

void Bloom::restore_all(ByteReader& in) {
  window_ = in.take<std::uint32_t>("filter's window");
  if (in.take_flag("filter's lines")) {
    const auto lines = in.take_raw(bytes_, "filter's lines");
    make_room();
    std::memcpy(lines_.data(), lines.data(), bytes_);
  }
}

void Bloom::watch(Before* before, bool* lost) noexcept {
  before_ = before;
  lost_ = lost;
  if (before != nullptr) {
    before->window = window_;
    before->had_lines = lines_.bytes() != 0;
  }
}

unsigned Bloom::name_shift() const noexcept {
  return 64U - slot_bits_ - static_cast<unsigned>(std::bit_width(bytes_ / kCacheLine));
}

std::uint64_t Bloom::name_of(std::size_t line) const noexcept { return first_name_ + (line << name_shift()); }

std::size_t Bloom::line_named(std::uint64_t name) const noexcept {
  return (name - first_name_) >> name_shift();
}

void Bloom::log(std::span<const std::uint64_t> hashes) {
  if (!before_->had_lines || before_->anew) {
    return;
  }
  std::vector<std::uint64_t> names;
  for (const std::uint64_t hash : hashes) {
    const std::uint64_t name = name_of(shape_->line_of(hash) - first_line_);
    if (names.empty() || names.back() != name) {
      names.push_back(name);
    }
  }
  const auto missing = before_->changed.missing(names);
  std::vector<const std::byte*> there(missing.size());
  std::ranges::transform(missing, there.begin(),
                         [&](std::uint64_t name) { return lines_.data() + line_named(name) * kCacheLine; });
  before_->changed.log(missing, there);
}

void Bloom::save(const Before& before, std::span<std::byte> lines, std::vector<std::byte>& bytes) const {
  if (!before.had_lines) {
    return;
  }
  for (const PreImageLog::Piece& piece : before.changed.entries()) {
    std::memcpy(lines.data() + line_named(piece.hash) * kCacheLine, piece.bytes, kCacheLine);
  }
  bytes.resize(kHead + bytes_);
  std::memcpy(bytes.data(), &before.window, sizeof before.window);
  std::memcpy(bytes.data() + kHead, lines.data(), bytes_);
}

void Bloom::restore(Slots cut, Slot slot, std::span<const std::byte> bytes) noexcept {
  std::uint32_t window;
  std::memcpy(&window, bytes.data(), sizeof window);
  turn_to(window);
  if (window != window_) {
    return;  // the window is older than that of another piece
  }
  const std::size_t given_first = index_of(slot) * (shape_->slot_bytes(cut) / kCacheLine);
  const std::size_t given_end = given_first + (bytes.size() - kHead) / kCacheLine;
  const std::size_t begin = std::max(first_line_, given_first);
  const std::size_t end = std::min(first_line_ + bytes_ / kCacheLine, given_end);
  if (begin < end) {
    std::memcpy(lines_.data() + (begin - first_line_) * kCacheLine,
                bytes.data() + kHead + (begin - given_first) * kCacheLine, (end - begin) * kCacheLine);
  }
}

}  // namespace shoal
