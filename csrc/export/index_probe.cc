// Each stage is some 64 hashes behind the one before it, which hides the latency of memory, and a run is
// short: then what several runs hold, and the lines that were prefetched for them, stay in the L1 cache. Most
// of the time goes into instructions, and the rest into address translation rather than into cache lines: a
// prefetch occupies the processor until its address is translated, so addresses are to be known early, and
// other work is to be in the same loop (docs/decisions/0042).
//
// The loops have no branch that depends on a hash: whether it is present, in which lane, and whether it may
// be displaced, is unpredictable. Absent hashes are collected in a mask, and get a row like the others. The
// rare exceptions (two hashes of a line with equal low bits, a hash with the low bits of an empty line, one
// that is displaced by more than a line) are detected once per run.

#include "export/index_probe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/half.h"
#include "base/intrinsics.h"
#include "base/known_dim.h"
#include "base/unaligned.h"
#include "export/widen.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxLinearLines = 32;   // after a home; random hashes are displaced less far
constexpr std::size_t kMaxPrefetchLines = 8;  // of a row; the hardware prefetcher follows longer ones

SHOAL_INLINE void prefetch_line(const std::byte* at) noexcept { __builtin_prefetch(at); }

// The number of lines of a row to prefetch; one more if a row may begin anywhere in a line.
constexpr std::size_t lines_of(std::size_t bytes) noexcept {
  const std::size_t whole = (bytes + kCacheLine - 1) / kCacheLine;
  const bool aligned = bytes % kCacheLine == 0 || kCacheLine % bytes == 0;
  return std::min(whole + (aligned ? 0 : 1), kMaxPrefetchLines);
}

SHOAL_INLINE void prefetch_row(const std::byte* row, std::size_t bytes, std::size_t lines) noexcept {
  prefetch_line(row);
  for (std::size_t k = 1; k < lines; ++k) {
    prefetch_line(row + std::min(k * kCacheLine, bytes - 1));
  }
}

struct PortableLines {
  static SHOAL_INLINE unsigned same_low(const std::byte* line, std::uint32_t low) noexcept {
    return LineFormat::same_low(line, low);
  }
};

#if defined(SHOAL_SIMD)
struct SimdLines {
  SHOAL_SIMD static inline unsigned same_low(const std::byte* line, std::uint32_t low) noexcept {
#if defined(__x86_64__)
    const auto* const at = reinterpret_cast<const __m256i*>(line);
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(low));
    const auto mask = [](__m256i same) SHOAL_SIMD {
      return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(same)));
    };
    return mask(_mm256_cmpeq_epi32(_mm256_load_si256(at), wanted)) |
           mask(_mm256_cmpeq_epi32(_mm256_load_si256(at + 1), wanted)) << 8U;
#else
    static constexpr std::array<std::uint8_t, 8> kBits{1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x8_t bits = vld1_u8(kBits.data());
    const uint32x4_t wanted = vdupq_n_u32(low);
    const auto same = [line, wanted](std::size_t at) {
      const uint8x16_t four = vld1q_u8(reinterpret_cast<const std::uint8_t*>(line + at));
      return vmovn_u32(vceqq_u32(vreinterpretq_u32_u8(four), wanted));
    };
    const auto mask = [bits](uint16x4_t low_half, uint16x4_t high_half) {
      return unsigned{vaddv_u8(vand_u8(vmovn_u16(vcombine_u16(low_half, high_half)), bits))};
    };
    return mask(same(0), same(16)) | mask(same(32), same(48)) << 8U;
#endif
  }
};
#endif

}  // namespace

// A row of one weight as the bits of a float; a removed row is a NaN.
template <RowFormat::Code kCode>
struct ScalarRow {
  static SHOAL_INLINE std::uint32_t bits([[maybe_unused]] const std::byte* line,
                                         const std::byte* row) noexcept {
    if constexpr (kCode == RowFormat::Code::kFloat32) {
      return load<std::uint32_t>(row);
    } else if constexpr (kCode == RowFormat::Code::kBfloat16) {
      return std::uint32_t{load<std::uint16_t>(row)} << 16U;
    } else if constexpr (kCode == RowFormat::Code::kFloat16) {
      return std::bit_cast<std::uint32_t>(from_float16(load<std::uint16_t>(row)));
    } else {
      const auto integer = load<std::int8_t>(row);
      const float scale = from_bfloat16(load<std::uint16_t>(line + LineFormat::kScale));
      const std::uint32_t removed = integer == -128 ? 0x7fc00000U : 0;
      return std::bit_cast<std::uint32_t>(scale * static_cast<float>(integer)) | removed;
    }
  }
};

// The line format, for the inner loops.
//
// Most layers have one width in all sections: the format is a constant.
template <std::size_t kWidth, std::size_t kRow>
struct FixedWidth {
  static constexpr bool kInlineRows = kRow != 0;
  static constexpr LineFormat kForm{kWidth, kRow};

  static SHOAL_INLINE constexpr const LineFormat& of(const IndexProbe&, const ProbeRun&,
                                                     std::uint64_t) noexcept {
    return kForm;
  }
};

// In other layers it depends on the slot.
template <bool kAreInline>
struct AnyWidth {
  static constexpr bool kInlineRows = kAreInline;

  static SHOAL_INLINE const LineFormat& of(const IndexProbe& by, const ProbeRun& run,
                                           std::uint64_t hash) noexcept;
};

// The loops over a run's hashes, instantiated for each line format and each way of comparing.
struct ProbeKernels {
  static SHOAL_INLINE const LineFormat& form_of(const IndexProbe& by, const ProbeRun& run,
                                                std::uint64_t hash) noexcept {
    return by.forms_[run.layer.row_arrays[index_of(by.slots_.of(hash))].width - LineFormat::kMinRowBytes];
  }

  // Looks up one hash in one line by exact comparison: returns 1 and sets its row if it is there, else 0.
  template <class Form, class Lines>
  static SHOAL_INLINE unsigned read(const IndexProbe& by, ProbeRun& run, std::size_t i,
                                    const std::byte* line) noexcept {
    const std::uint64_t hash = run.hashes[i];
    const LineFormat& form = Form::of(by, run, hash);
    const unsigned match = Lines::same_low(line, static_cast<std::uint32_t>(hash)) & form.lane_mask;
    auto lane = static_cast<std::size_t>(std::countr_zero(match)) % 32;  // 0 without a match
    std::uint32_t high;
    std::memcpy(&high, line + form.high_at(lane), sizeof high);
    const std::uint32_t other = (high ^ static_cast<std::uint32_t>(hash >> 32U)) & form.high_mask;
    const unsigned filled = line[LineFormat::kReach] == std::byte{LineFormat::kEmpty} ? 0 : 1;
    unsigned is_match = (match == 0 ? 0U : 1U) & filled;
    // Two hashes of a line have equal low bits in one of 2^28 lines. A bit trick, because `other != 0` would
    // become a branch as well, which waits for the line and is mispredicted for each displaced hash.
    if ((is_match & ((other | (0U - other)) >> 31U)) != 0) [[unlikely]] {
      const unsigned exact = form.find(line, hash);
      is_match = exact != LineFormat::kNone ? 1 : 0;
      lane = exact % LineFormat::kNone;
    }
    run.rows[i] = RowPlaces<Form>(by, run).of(form, hash, line, lane);
    return is_match;
  }

  // What a loop over hashes needs to know of the rows, in registers. kBytes: of a wide row, if that is a
  // constant.
  template <class Form, std::size_t kBytes = 0>
  struct RowPlaces {
    SHOAL_INLINE RowPlaces(const IndexProbe& by, const ProbeRun& run) noexcept
        : arrays(run.layer.row_arrays),
          shift(64U - by.slots_.bits()),
          bytes(kBytes != 0 ? kBytes : by.form_.bytes()),
          lines(kBytes != 0 ? lines_of(kBytes) : by.lines_of_row_) {}

    const RowArrayView* arrays;
    unsigned shift;
    std::size_t bytes;  // of a wide row
    std::size_t lines;  // of a wide row, to prefetch

    // The row in a lane; another one if a damaged line names a row beyond the last.
    SHOAL_INLINE const std::byte* of(const LineFormat& form, std::uint64_t hash, const std::byte* line,
                                     std::size_t lane) const noexcept {
      if constexpr (Form::kInlineRows) {
        return line + form.row_at(lane);
      } else {
        const RowArrayView& array = arrays[hash >> shift];
        std::uint32_t number;
        std::memcpy(&number, line + LineFormat::kFirstRow, sizeof number);
        const std::uint64_t at = std::uint64_t{number} + lane;
        const std::uint64_t within = 0 - std::uint64_t{at < array.count};  // all ones, or 0
        return array.rows + (at & within) * bytes;
      }
    }

    // Prefetches a row, unless `none` is 1. The lines after the homes are not prefetched here, because the
    // address would depend on more: 0.5 of 10 ns per hash.
    SHOAL_INLINE void prefetch(const std::byte* line, const std::byte* row,
                               std::uint32_t none) const noexcept {
      if constexpr (!Form::kInlineRows) {
        const auto to_row = reinterpret_cast<std::uintptr_t>(row);
        const auto to_line = reinterpret_cast<std::uintptr_t>(line);
        const std::uintptr_t absent = 0 - std::uintptr_t{none};
        prefetch_row(reinterpret_cast<const std::byte*>(to_row ^ ((to_row ^ to_line) & absent)), bytes,
                     lines);
      }
    }
  };

  // Calls use(i, line, form, lane, none) for each hash of a run: `lane` is the first one with its low bits;
  // `none` is 0, or all ones if there is no such lane. Returns whether the high bits of all matches agree
  // too; if not, no result is valid.
  template <class Form, class Lines, class Use>
  static SHOAL_INLINE bool probe_by_low_bits(const IndexProbe& by, const ProbeRun& run, const ProbeRun& later,
                                             const Use& use) noexcept {
    const std::size_t size = run.size;
    std::uint32_t other = 0;
    for (std::size_t i = 0; i < size; ++i) {
      prefetch_line(later.lines[i]);
      const std::byte* const line = run.lines[i];
      const std::uint64_t hash = run.hashes[i];
      const LineFormat& form = Form::of(by, run, hash);
      const unsigned match = Lines::same_low(line, static_cast<std::uint32_t>(hash)) & form.lane_mask;
      const std::uint32_t none = match == 0 ? ~std::uint32_t{0} : 0;
      const auto lane = static_cast<std::size_t>(std::countr_zero(match | form.last_lane));
      std::uint32_t high;
      std::memcpy(&high, line + form.high_at(lane), sizeof high);
      other |= (high ^ static_cast<std::uint32_t>(hash >> 32U)) & ~none & form.high_mask;
      use(i, line, form, lane, none);
    }
    return other == 0 && !any_low_is_zero(run);
  }

  // Whether a hash has the low bits of an empty line, which are zero.
  static SHOAL_INLINE bool any_low_is_zero(const ProbeRun& run) noexcept {
    std::uint32_t zero = 0;
    for (std::size_t i = 0; i < run.size; ++i) {
      zero |= static_cast<std::uint32_t>(run.hashes[i]) == 0 ? 1U : 0U;
    }
    return zero != 0;
  }

  // Calls use(i) for each bit of a mask.
  template <class Use>
  static SHOAL_INLINE void each_bit(std::uint32_t mask, const Use& use) noexcept {
    for (; mask != 0; mask &= mask - 1) {
      use(static_cast<std::size_t>(std::countr_zero(mask)));
    }
  }

  // 1 if a hash with this home may be in a line after it, else 0; without a branch.
  static SHOAL_INLINE std::uint32_t may_be_displaced(const std::byte* line) noexcept {
    const unsigned reach =
        (std::to_integer<unsigned>(line[LineFormat::kReach]) + 1) & 0xfeU;  // 0 or from 2 to 254
    return (reach + 0xfeU) >> 8U;
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void probe_exactly(const IndexProbe& by, ProbeRun& run) noexcept {
    run.absent = 0;
    for (std::size_t i = 0; i < run.size; ++i) {
      run.absent |= (read<Form, Lines>(by, run, i, run.lines[i]) ^ 1U) << i;
    }
  }

  // Finds out which of the absent hashes may be displaced, and prefetches the lines after their homes.
  static SHOAL_INLINE void find_unresolved(ProbeRun& run) noexcept {
    std::uint32_t unresolved = 0;
    each_bit(run.absent, [&](std::size_t i) SHOAL_ALWAYS {
      const std::uint32_t displaced = may_be_displaced(run.lines[i]);
      prefetch_line(run.lines[i] + std::size_t{displaced} * kCacheLine);
      unresolved |= displaced << i;
    });
    run.unresolved = unresolved;
  }

  // Calls also(i) in the loop over the hashes.
  template <class Form, class Lines, std::size_t kBytes = 0, class Also>
  static SHOAL_INLINE void probe(const IndexProbe& by, ProbeRun& run, const ProbeRun& later,
                                 const Also& also) noexcept {
    const RowPlaces<Form, kBytes> places(by, run);
    std::uint32_t absent = 0;
    const bool sure =
        probe_by_low_bits<Form, Lines>(by, run, later,
                                       [&](std::size_t i, const std::byte* line, const LineFormat& form,
                                           std::size_t lane, std::uint32_t none) SHOAL_ALWAYS {
                                         run.rows[i] = places.of(form, run.hashes[i], line, lane);
                                         places.prefetch(line, run.rows[i], none & 1U);
                                         absent |= (none & 1U) << i;
                                         also(i);
                                       });
    run.absent = absent;
    if (!sure) [[unlikely]] {
      probe_exactly<Form, Lines>(by, run);
    }
    find_unresolved(run);
  }

#if defined(SHOAL_SIMD)
  // Returns 1 if the row is marked as removed, else 0.
  template <class Kind, std::size_t kDim>
  SHOAL_SIMD SHOAL_ALWAYS static inline std::uint32_t widen_row(const std::byte* row, float* to) noexcept {
    widen::row_by_simd<Kind>(row, kDim, to);
    return Kind::is_removed(row) ? 1 : 0;
  }

  // probe(), and in the same loop widens the rows of a run that is `ready`: the processor computes while it
  // waits for the translation of the addresses of what is prefetched. Returns a mask of the removed rows.
  template <class Form, class Kind, std::size_t kDim>
  SHOAL_SIMD static std::uint32_t probe_and_widen(const IndexProbe& by, ProbeRun& run, const ProbeRun& later,
                                                  const ProbeRun& ready, float* weights) noexcept {
    std::uint32_t removed = 0;
    constexpr std::size_t kBytes = Kind::kFirst + kDim * sizeof(typename Kind::Stored);
    probe<Form, SimdLines, kBytes>(by, run, later, [&](std::size_t i) SHOAL_SIMD {
      removed |= widen_row<Kind, kDim>(ready.rows[i], weights + i * kDim) << i;
    });
    for (std::size_t i = run.size; i < ready.size; ++i) {
      removed |= widen_row<Kind, kDim>(ready.rows[i], weights + i * kDim) << i;
    }
    return removed;
  }
#endif

  template <class Form, class Lines, class ScalarRow>
  static SHOAL_INLINE void probe_scalars(const IndexProbe& by, ProbeRun& run, const ProbeRun& later,
                                         float* weights) noexcept {
    std::uint32_t absent = 0;
    const auto put = [weights](std::size_t i, std::uint32_t bits)
                         SHOAL_ALWAYS { std::memcpy(weights + i, &bits, sizeof bits); };
    const bool sure =
        probe_by_low_bits<Form, Lines>(by, run, later,
                                       [&](std::size_t i, const std::byte* line, const LineFormat& form,
                                           std::size_t lane, std::uint32_t none) SHOAL_ALWAYS {
                                         put(i, ScalarRow::bits(line, line + form.row_at(lane)) | none);
                                         absent |= (none & 1U) << i;
                                       });
    run.absent = absent;
    if (!sure) [[unlikely]] {
      probe_exactly<Form, Lines>(by, run);
      for (std::size_t i = 0; i < run.size; ++i) {
        const std::uint32_t none = 0U - ((run.absent >> i) & 1U);
        put(i, ScalarRow::bits(run.lines[i], run.rows[i]) | none);
      }
    }
    find_unresolved(run);
  }

  // The line among [first, first + most], a home and the lines after it, that must hold a hash: the last one
  // whose first hash is not greater, by binary search, because hashes are stored in order. Long displacements
  // arise from colliding hashes that an adversary has chosen; a linear search of them would take quadratic
  // time in all.
  template <class Form>
  static const std::byte* find_line(const IndexProbe& by, const ProbeRun& run, const Section& section,
                                    std::uint64_t hash, std::size_t first, std::size_t most) noexcept {
    const LineFormat& form = Form::of(by, run, hash);
    const Homes homes{by.slots_, section.homes};
    std::size_t last = first + most;
    while (first != last) {
      const std::size_t line = last - (last - first) / 2;
      const std::uint64_t least = homes.least(by.slots_.of(hash), line, section.reach);
      if (Homes::hash(least, form.width, form.stored(section.lines + line * kCacheLine, 0)) <= hash) {
        first = line;
      } else {
        last = line - 1;
      }
    }
    return section.lines + first * kCacheLine;
  }

  // Reads the lines after the homes until every hash of the run is resolved. Calls found(i, line, here) for
  // each line that is read for hash i: `here` is 1 if it is there, and run.rows[i] is its row.
  template <class Form, class Lines, class Found>
  static SHOAL_INLINE void resolve(const IndexProbe& by, ProbeRun& run, const Found& found) noexcept {
    const RowPlaces<Form> places(by, run);
    std::uint32_t left = 0;
    each_bit(run.unresolved, [&](std::size_t i) SHOAL_ALWAYS {
      const std::byte* const home = run.lines[i];
      const std::byte* const line = run.layer.indexes[index_of(by.slots_.of(run.hashes[i]))].next(home);
      const std::uint32_t is_match = read<Form, Lines>(by, run, i, line);
      const std::uint32_t more = home[LineFormat::kReach] > std::byte{1} ? 1 : 0;
      run.absent &= ~(is_match << i);
      left |= (more & ~is_match) << i;
      places.prefetch(line, run.rows[i], is_match ^ 1U);
      found(i, line, is_match);
    });
    for (std::size_t step = 2; left != 0; ++step) {
      each_bit(std::exchange(left, 0), [&](std::size_t i) SHOAL_ALWAYS {
        const Section& section = by.section_of(run, run.hashes[i]);
        const std::byte* const home = run.lines[i];
        const std::size_t said = std::to_integer<std::size_t>(home[LineFormat::kReach]);
        const auto first = static_cast<std::size_t>(home - section.lines) / kCacheLine;
        const std::size_t most =
            std::min<std::size_t>(said == LineFormat::kFar ? section.reach : said, section.count - 1 - first);
        // A damaged home may name lines beyond the last: then the last is read again.
        const bool many = most > kMaxLinearLines;
        const std::byte* const line = many ? find_line<Form>(by, run, section, run.hashes[i], first, most)
                                           : home + std::min(step, most) * kCacheLine;
        const std::uint32_t is_match = read<Form, Lines>(by, run, i, line);
        run.absent &= ~(is_match << i);
        left |= (step < most && !many ? ~is_match & 1U : 0U) << i;
        places.prefetch(line, run.rows[i], is_match ^ 1U);
        prefetch_line(line + kCacheLine);
        found(i, line, is_match);
      });
    }
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void resolve(const IndexProbe& by, ProbeRun& run) noexcept {
    resolve<Form, Lines>(by, run, [](std::size_t, const std::byte*, std::uint32_t) SHOAL_ALWAYS {});
    each_bit(run.absent, [&](std::size_t i) SHOAL_ALWAYS { run.rows[i] = by.no_row(); });
  }

  template <class Form, class Lines, class ScalarRow>
  static SHOAL_INLINE void resolve_scalars(const IndexProbe& by, ProbeRun& run, float* weights) noexcept {
    resolve<Form, Lines>(by, run,
                         [&](std::size_t i, const std::byte* line, std::uint32_t is_match) SHOAL_ALWAYS {
                           const std::uint32_t mask = 0U - is_match;
                           std::uint32_t bits;
                           std::memcpy(&bits, weights + i, sizeof bits);
                           bits = (bits & ~mask) | (ScalarRow::bits(line, run.rows[i]) & mask);
                           std::memcpy(weights + i, &bits, sizeof bits);
                         });
  }
};

template <bool kAreInline>
SHOAL_INLINE const LineFormat& AnyWidth<kAreInline>::of(const IndexProbe& by, const ProbeRun& run,
                                                        std::uint64_t hash) noexcept {
  return ProbeKernels::form_of(by, run, hash);
}

namespace {

// The kernels of one line format; those for rows of one weight are ScalarKernels.
template <class Form>
struct RowKernels {
  static void probe(const IndexProbe& by, ProbeRun& run, const ProbeRun& later) noexcept {
    ProbeKernels::probe<Form, PortableLines>(by, run, later, [](std::size_t) SHOAL_ALWAYS {});
  }
  static void resolve(const IndexProbe& by, ProbeRun& run) noexcept {
    ProbeKernels::resolve<Form, PortableLines>(by, run);
  }
#if defined(SHOAL_SIMD)
  SHOAL_SIMD static void probe_by_simd(const IndexProbe& by, ProbeRun& run, const ProbeRun& later) noexcept {
    ProbeKernels::probe<Form, SimdLines>(by, run, later, [](std::size_t) SHOAL_ALWAYS {});
  }
  SHOAL_SIMD static void resolve_by_simd(const IndexProbe& by, ProbeRun& run) noexcept {
    ProbeKernels::resolve<Form, SimdLines>(by, run);
  }
#endif
};

template <class Form, class ScalarRow>
struct ScalarKernels {
  static void probe(const IndexProbe& by, ProbeRun& run, const ProbeRun& later, float* weights) noexcept {
    ProbeKernels::probe_scalars<Form, PortableLines, ScalarRow>(by, run, later, weights);
  }
  static void resolve(const IndexProbe& by, ProbeRun& run, float* weights) noexcept {
    ProbeKernels::resolve_scalars<Form, PortableLines, ScalarRow>(by, run, weights);
  }
#if defined(SHOAL_SIMD)
  SHOAL_SIMD static void probe_by_simd(const IndexProbe& by, ProbeRun& run, const ProbeRun& later,
                                       float* weights) noexcept {
    ProbeKernels::probe_scalars<Form, SimdLines, ScalarRow>(by, run, later, weights);
  }
  SHOAL_SIMD static void resolve_by_simd(const IndexProbe& by, ProbeRun& run, float* weights) noexcept {
    ProbeKernels::resolve_scalars<Form, SimdLines, ScalarRow>(by, run, weights);
  }
#endif
};

// Rows of more than one weight have none.
template <class Form>
struct ScalarKernels<Form, void> {
  static constexpr std::nullptr_t probe = nullptr;
  static constexpr std::nullptr_t resolve = nullptr;
  static constexpr std::nullptr_t probe_by_simd = nullptr;
  static constexpr std::nullptr_t resolve_by_simd = nullptr;
};

template <class Form, class ScalarRow>
IndexProbe::Kernels choose([[maybe_unused]] bool by_simd) noexcept {
#if defined(SHOAL_SIMD)
  if (by_simd) {
    return {RowKernels<Form>::probe_by_simd, RowKernels<Form>::resolve_by_simd,
            ScalarKernels<Form, ScalarRow>::probe_by_simd, ScalarKernels<Form, ScalarRow>::resolve_by_simd};
  }
#endif
  return {RowKernels<Form>::probe, RowKernels<Form>::resolve, ScalarKernels<Form, ScalarRow>::probe,
          ScalarKernels<Form, ScalarRow>::resolve};
}

// By width, from LineFormat::kMinRowBytes on; the last element is for mixed widths.
template <std::size_t kRow, class ScalarRow = void>
IndexProbe::KernelTable choose_each(bool by_simd) noexcept {
  return {choose<FixedWidth<5, kRow>, ScalarRow>(by_simd), choose<FixedWidth<6, kRow>, ScalarRow>(by_simd),
          choose<FixedWidth<7, kRow>, ScalarRow>(by_simd), choose<FixedWidth<8, kRow>, ScalarRow>(by_simd),
          choose<AnyWidth<kRow != 0>, ScalarRow>(by_simd)};
}

IndexProbe::KernelTable choose_kernels(const RowFormat& form) noexcept {
  const bool by_simd = form.by_simd();
  if (form.dim() == 1) {
    switch (form.code()) {
      case RowFormat::Code::kFloat32:
        return choose_each<4, ScalarRow<RowFormat::Code::kFloat32>>(by_simd);
      case RowFormat::Code::kFloat16:
        return choose_each<2, ScalarRow<RowFormat::Code::kFloat16>>(by_simd);
      case RowFormat::Code::kBfloat16:
        return choose_each<2, ScalarRow<RowFormat::Code::kBfloat16>>(by_simd);
      case RowFormat::Code::kInt8:
        return choose_each<1, ScalarRow<RowFormat::Code::kInt8>>(by_simd);
    }
  }
  return form.is_inline() ? choose_each<4>(by_simd) : choose_each<0>(by_simd);  // two weights, or wide
}

}  // namespace

namespace {

constexpr std::size_t kWidenedWidth = 6;  // bytes per hash, as in tables of 1e6 to 1e8 rows

#if defined(SHOAL_SIMD)
template <class Kind>
IndexProbe::Widen choose_widen(std::size_t dim) noexcept {
  return with_dim<8, 16, 32, 64>(dim, [](auto known) -> IndexProbe::Widen {
    if constexpr (known == 0) {
      return nullptr;
    } else {
      return &ProbeKernels::probe_and_widen<FixedWidth<kWidenedWidth, 0>, Kind, known>;
    }
  });
}
#endif

IndexProbe::Widen choose_widen([[maybe_unused]] const RowFormat& form) noexcept {
#if defined(SHOAL_SIMD)
  if (form.by_simd() && !form.is_inline()) {
    switch (form.code()) {
      case RowFormat::Code::kFloat32:
        return choose_widen<widen::Float32>(form.dim());
      case RowFormat::Code::kFloat16:
        return choose_widen<widen::Float16>(form.dim());
      case RowFormat::Code::kBfloat16:
        return choose_widen<widen::Bfloat16>(form.dim());
      case RowFormat::Code::kInt8:
        return choose_widen<widen::Int8>(form.dim());
    }
  }
#endif
  return nullptr;
}

}  // namespace

IndexProbe::Widen IndexProbe::widens(std::size_t width) const noexcept {
  return width == kWidenedWidth ? widen_ : nullptr;
}

IndexProbe::IndexProbe(const RowFormat& form, Slots slots, std::span<const std::byte> no_row)
    : form_(form),
      slots_(slots),
      lines_of_row_(lines_of(form.bytes())),
      no_row_(no_row.begin(), no_row.end()),
      kernels_(choose_kernels(form)),
      widen_(choose_widen(form)) {
  for (std::size_t k = 0; k < forms_.size(); ++k) {
    forms_[k] = LineFormat(form, LineFormat::kMinRowBytes + k);
  }
}

const std::byte* IndexProbe::row_of(const Section& section, const std::byte* line,
                                    unsigned lane) const noexcept {
  if (form_.is_inline()) {
    return line + form_of(section).row_at(lane);
  }
  std::uint32_t number;
  std::memcpy(&number, line + LineFormat::kFirstRow, sizeof number);
  const std::uint64_t row = std::uint64_t{number} + lane;
  return row < section.rows_count ? section.rows() + row * form_.bytes() : nullptr;
}

}  // namespace shoal
