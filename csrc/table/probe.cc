#include "table/probe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "table/match.h"

namespace shoal {

// The loops over a run's hashes, specialized by payload width and by match instruction set.
struct ProbeSteps {
  // One hash in one line. `next` returns the following line of its probe sequence, `passed` is the bit that
  // says whether there may be one.
  template <std::size_t kCells, std::size_t kPayload, class Match, class Next>
  static SHOAL_INLINE void read(std::uint64_t cell, std::uint32_t i, std::byte* line, std::uint64_t both,
                                std::uint64_t passed, std::byte** at, std::uint32_t* open,
                                std::size_t& open_count, const Next& next) noexcept {
    const unsigned match = Match::template in<kCells>(line, cell, both);
    std::uint64_t last;
    std::memcpy(&last, line + (kCells - 1) * sizeof last, sizeof last);
    const auto c = static_cast<std::size_t>(std::countr_zero(match | (1U << kCells)));
    at[i] = match != 0 ? line + kCells * sizeof(std::uint64_t) + c * kPayload : nullptr;
    if (match == 0 && PassedBits::says(last, passed)) [[unlikely]] {
      open[open_count++] = i;
      at[i] = next();
      prefetch(at[i]);
    }
  }

  template <std::size_t kCells, std::size_t kPayload, class Match>
  static SHOAL_INLINE void probe(Probe& run, PrefetchCursor& ahead) noexcept {
    std::byte** const at = run.at_.data();
    std::uint32_t* const open = run.open_.data();
    const std::uint64_t* const hashes = run.hashes_;
    const std::uint64_t in_use = run.in_use_;
    const PassedBits passed = run.passed_;
    const unsigned slot_bits = run.layout_->slots.bits();
    std::size_t open_count = 0;
    PrefetchCursor cursor = ahead;
    for (const Probe::Part& given : run.parts()) {
      const Probe::Part part = given;  // a copy: the stores below cannot alias it
      if (part.known) {
        for (std::size_t i = part.begin; i < part.end; i += 2) {
          cursor.next();
        }
        continue;
      }
      for (std::size_t i = part.begin; i < part.end; ++i) {
        if (i % 2 == 0) {  // the caller prefetches the rest of the rows
          cursor.next();
        }
        std::byte* const line = at[i];
        read<kCells, kPayload, Match>(hashes[i] | in_use, static_cast<std::uint32_t>(i), line, passed.both,
                                      passed.home, at, open, open_count, [&] {
                                        const std::uint64_t key = BucketLines::probe_key(
                                            hashes[i] | in_use, part.scramble, slot_bits);
                                        return part.line(BucketLines::second(key, part.bucket(line)));
                                      });
      }
    }
    ahead = cursor;
    run.open_count_ = open_count;
  }

  template <std::size_t kCells, std::size_t kPayload, class Match>
  static SHOAL_INLINE void follow(Probe& run) noexcept {
    const Probe::Part* part = run.parts_.data();
    const std::size_t count = std::exchange(run.open_count_, 0);
    for (std::size_t k = 0; k < count; ++k) {
      const std::uint32_t i = run.open_[k];  // which is written at open_count_, at most k
      while (i >= part->end) {
        ++part;
      }
      std::byte* const line = run.at_[i];
      read<kCells, kPayload, Match>(run.hashes_[i] | run.in_use_, i, line, run.passed_.both,
                                    run.passed_.later, run.at_.data(), run.open_.data(), run.open_count_,
                                    [&] { return part->line(part->bucket(line) + 1); });
    }
  }
};

namespace {

template <std::size_t kCells, std::size_t kPayload>
void probe_portable(Probe& run, PrefetchCursor& ahead) noexcept {
  ProbeSteps::probe<kCells, kPayload, PortableMatch>(run, ahead);
}

template <std::size_t kCells, std::size_t kPayload>
void follow_portable(Probe& run) noexcept {
  ProbeSteps::follow<kCells, kPayload, PortableMatch>(run);
}

#if defined(SHOAL_SIMD)
template <std::size_t kCells, std::size_t kPayload>
SHOAL_SIMD void probe_simd(Probe& run, PrefetchCursor& ahead) noexcept {
  ProbeSteps::probe<kCells, kPayload, SimdMatch>(run, ahead);
}

template <std::size_t kCells, std::size_t kPayload>
SHOAL_SIMD void follow_simd(Probe& run) noexcept {
  ProbeSteps::follow<kCells, kPayload, SimdMatch>(run);
}
#endif

template <std::size_t kCells, std::size_t kPayload, class ProbeLines, class Follow>
void choose(ProbeLines& probe, Follow& follow) noexcept {
  probe = &probe_portable<kCells, kPayload>;
  follow = &follow_portable<kCells, kPayload>;
#if defined(SHOAL_SIMD)
  if (has_simd()) {
    probe = &probe_simd<kCells, kPayload>;
    follow = &follow_simd<kCells, kPayload>;
  }
#endif
}

}  // namespace

Probe::Probe(const Layout& layout) noexcept
    : layout_(&layout), in_use_(~(~std::uint64_t{0} >> layout.slots.bits())), passed_(layout.slots) {
  switch (layout.payload_bytes) {
    case 4:
      choose<5, 4>(probe_, follow_);
      break;
    case 8:
      choose<4, 8>(probe_, follow_);
      break;
    case 12:
      choose<3, 12>(probe_, follow_);
      break;
    default:
      choose<2, 16>(probe_, follow_);
  }
}

void Probe::start(const std::uint64_t* hashes) noexcept {
  hashes_ = hashes;
  size_ = 0;
  open_count_ = 0;
  parts_count_ = 0;
  resolved_ = false;
}

void Probe::prepare(SlotTable& table, std::size_t count) noexcept {
  const auto [lines, buckets, scramble] = table.buckets();
  const unsigned slot_bits = layout_->slots.bits();
  const std::size_t begin = size_;
  if (scramble == 0) [[likely]] {
    for (std::size_t i = begin; i < begin + count; ++i) {
      at_[i] = lines + scale(hashes_[i] << slot_bits, buckets) * kCacheLine;
    }
  } else {
    for (std::size_t i = begin; i < begin + count; ++i) {
      const std::uint64_t key = BucketLines::probe_key(hashes_[i], scramble, slot_bits);
      at_[i] = lines + scale(key << slot_bits, buckets) * kCacheLine;
    }
  }
  size_ += count;
  parts_[parts_count_++] = {&table, table.version(), lines, buckets, scramble, begin, size_, false};
}

void Probe::add_known(SlotTable& table, std::span<std::byte* const> rows) noexcept {
  const std::size_t begin = size_;
  std::copy(rows.begin(), rows.end(), at_.begin() + static_cast<std::ptrdiff_t>(begin));
  size_ += rows.size();
  const auto [lines, buckets, scramble] = table.buckets();
  parts_[parts_count_++] = {&table, table.version(), lines, buckets, scramble, begin, size_, true};
}

bool Probe::moved() const noexcept {
  return std::any_of(parts_.begin(), parts_.begin() + static_cast<std::ptrdiff_t>(parts_count_),
                     [](const Part& part) { return part.version != part.table->version(); });
}

void Probe::prepare_again() noexcept {
  const auto parts = parts_;
  const std::size_t count = parts_count_;
  start(hashes_);
  for (std::size_t p = 0; p < count; ++p) {
    prepare(*parts[p].table, parts[p].end - parts[p].begin);
  }
}

void Probe::probe(PrefetchCursor& ahead) noexcept {
  if (moved()) {
    prepare_again();
  }
  probe_(*this, ahead);
}

void Probe::resolve() noexcept {
  if (moved()) {
    prepare_again();
    PrefetchCursor none;
    probe_(*this, none);
  }
  if (!resolved_) {
    find_rows();
    resolved_ = true;
  }
}

void Probe::find_rows() noexcept {
  while (open_count_ != 0) {
    follow_(*this);
  }
  if (layout_->narrow) {
    return;
  }
  for (const Part& part : parts()) {
    if (part.known) {
      continue;
    }
    const Slab& slab = part.table->slab();
    for (std::size_t i = part.begin; i < part.end; ++i) {
      if (at_[i] != nullptr) {
        std::uint32_t number;
        std::memcpy(&number, at_[i], sizeof number);
        at_[i] = slab.row(number);
      }
    }
  }
}

}  // namespace shoal
