#include "export/index_probe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/half.h"
#include "base/intrinsics.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxLinearLines = 32;   // after a home; random hashes are displaced less far
constexpr std::size_t kMaxPrefetchLines = 8;  // of a row; the hardware prefetcher follows longer ones

SHOAL_INLINE void prefetch_line(const std::byte* at) noexcept { __builtin_prefetch(at); }

// The number of lines of a row to prefetch; one more if a row may begin anywhere in a line.
std::size_t lines_of(std::size_t bytes) noexcept {
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

// `row` if `wanted` is 1, null if it is 0; without a branch.
SHOAL_INLINE const std::byte* select_or_null(unsigned wanted, const std::byte* row) noexcept {
  const std::uintptr_t all = 0 - std::uintptr_t{wanted};
  return reinterpret_cast<const std::byte*>(reinterpret_cast<std::uintptr_t>(row) & all);
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

 private:
  template <class T>
  static SHOAL_INLINE T load(const std::byte* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
};

// The line format, for the inner loops.
//
// Most layers have one width in all sections: the format is a constant.
template <std::size_t kWidth, std::size_t kRow>
struct FixedWidth {
  static constexpr bool kInlineRows = kRow != 0;
  static constexpr LineFormat kForm{kWidth, kRow};

  static SHOAL_INLINE constexpr const LineFormat& of(const IndexProbe&, const Run&, std::uint64_t) noexcept {
    return kForm;
  }
};

// In other layers it depends on the slot.
template <bool kAreInline>
struct AnyWidth {
  static constexpr bool kInlineRows = kAreInline;

  static SHOAL_INLINE const LineFormat& of(const IndexProbe& by, const Run& run, std::uint64_t hash) noexcept;
};

// The loops over a run's hashes, instantiated for each line format and each way of comparing.
struct ProbeKernels {
  static SHOAL_INLINE const LineFormat& form_of(const IndexProbe& by, const Run& run,
                                                std::uint64_t hash) noexcept {
    return by.forms_[run.layer.indexes[index_of(by.slots_.of(hash))].width - LineFormat::kMinRowBytes];
  }

  // Looks up one hash in one line by exact comparison. Returns 1 if it is absent here and the lines after this one, if there
  // are `more`, may have it.
  template <class Form, class Lines>
  static SHOAL_INLINE unsigned read(const IndexProbe& by, Run& run, std::size_t i, const std::byte* line,
                                    unsigned more) noexcept {
    const std::uint64_t hash = run.hashes[i];
    const LineFormat& form = Form::of(by, run, hash);
    const unsigned match = Lines::same_low(line, static_cast<std::uint32_t>(hash)) & form.lane_mask;
    auto lane = static_cast<std::size_t>(std::countr_zero(match)) % 32;  // 0 without a match
    std::uint32_t high;
    std::memcpy(&high, line + form.high_at(lane), sizeof high);
    const std::uint32_t other = (high ^ static_cast<std::uint32_t>(hash >> 32U)) & form.high_mask;
    const unsigned filled = line[LineFormat::kReach] == std::byte{LineFormat::kEmpty} ? 0 : 1;
    unsigned here = (match == 0 ? 0U : 1U) & filled;
    // Two hashes of a line have equal low bits in one of 2^28 lines. A bit trick, because `other != 0` would become a branch
    // as well, which waits for the line and is mispredicted for each displaced hash.
    if ((here & ((other | (0U - other)) >> 31U)) != 0) [[unlikely]] {
      const unsigned exact = form.find(line, hash);
      here = exact != LineFormat::kNone ? 1 : 0;
      lane = exact % LineFormat::kNone;
    }
    run.rows[i] = row_at<Form>(by, run, form, hash, line, lane, here);
    return (here ^ 1U) & (more != 0 ? 1U : 0U);
  }

  // The row in a lane, or null if `here` is 0; a wide row is prefetched.
  template <class Form>
  static SHOAL_INLINE const std::byte* row_at(const IndexProbe& by, const Run& run, const LineFormat& form,
                                              std::uint64_t hash, const std::byte* line, std::size_t lane,
                                              unsigned here) noexcept {
    if constexpr (Form::kInlineRows) {
      return select_or_null(here, line + form.row_at(lane));
    } else {
      const RowArrayView& array = run.layer.row_arrays[index_of(by.slots_.of(hash))];
      std::uint32_t number;
      std::memcpy(&number, line + LineFormat::kFirstRow, sizeof number);
      const std::uint64_t at = std::uint64_t{number} + lane;
      const unsigned there = here & (at < array.count ? 1U : 0U);
      const std::byte* const row = select_or_null(there, array.rows + at * by.form_.bytes());
      prefetch_row(there != 0 ? row : line, by.form_.bytes(), by.lines_of_row_);
      return row;
    }
  }

  // Calls use(i, line, form, lane, none) for each hash of a run: `lane` is the first one with its low bits; `none` is 0, or
  // all ones if there is no such lane. Returns whether the high bits of all matches agree too; if not, no result is valid.
  template <class Form, class Lines, class Use>
  static SHOAL_INLINE bool probe_by_low_bits(const IndexProbe& by, const Run& run, const Use& use) noexcept {
    const std::size_t size = run.size;
    std::uint32_t other = 0;
    for (std::size_t i = 0; i < size; ++i) {
      prefetch_line(run.lines[i + Run::ahead(Form::kInlineRows)]);
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
  static SHOAL_INLINE bool any_low_is_zero(const Run& run) noexcept {
    std::uint32_t zero = 0;
    for (std::size_t i = 0; i < run.size; ++i) {
      zero |= static_cast<std::uint32_t>(run.hashes[i]) == 0 ? 1U : 0U;
    }
    return zero != 0;
  }

  // The distance, in lines, of a home's farthest hash; 0 for an empty line.
  static SHOAL_INLINE unsigned displaced_lines(const std::byte* line) noexcept {
    return (std::to_integer<unsigned>(line[LineFormat::kReach]) + 1) & 0xfeU;
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void probe_exactly(const IndexProbe& by, Run& run) noexcept {
    run.unresolved_count = 0;
    for (std::size_t i = 0; i < run.size; ++i) {
      const std::byte* const line = run.lines[i];
      run.unresolved[run.unresolved_count] = static_cast<std::uint16_t>(i);
      run.unresolved_count += read<Form, Lines>(by, run, i, line, displaced_lines(line));
    }
  }

  // Collects the hashes in a list that may be displaced, and prefetches the lines after their homes.
  static SHOAL_INLINE void collect_unresolved(Run& run, const std::uint16_t* list,
                                              std::size_t count) noexcept {
    std::size_t unresolved_count = 0;
    for (std::size_t k = 0; k < count; ++k) {
      const std::uint16_t i = list[k];
      const std::byte* const line = run.lines[i];
      run.unresolved[unresolved_count] = i;
      unresolved_count += displaced_lines(line) != 0 ? 1U : 0U;
    }
    run.unresolved_count = unresolved_count;
    for (std::size_t k = 0; k < unresolved_count; ++k) {
      prefetch_line(run.lines[run.unresolved[k]] + kCacheLine);
    }
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void probe(const IndexProbe& by, Run& run) noexcept {
    std::array<std::uint16_t, Run::kMaxSize + 1> missing;
    std::size_t count = 0;
    const bool sure = probe_by_low_bits<Form, Lines>(
        by, run,
        [&](std::size_t i, const std::byte* line, const LineFormat& form, std::size_t lane,
            std::uint32_t none) SHOAL_ALWAYS {
          run.rows[i] = row_at<Form>(by, run, form, run.hashes[i], line, lane, none + 1);
          missing[count] = static_cast<std::uint16_t>(i);
          count -= static_cast<std::size_t>(static_cast<std::int32_t>(none));
        });
    if (!sure) [[unlikely]] {
      return probe_exactly<Form, Lines>(by, run);
    }
    collect_unresolved(run, missing.data(), count);
  }

  template <class Form, class Lines, class ScalarRow>
  static SHOAL_INLINE void probe_scalars(const IndexProbe& by, Run& run, float* weights) noexcept {
    std::size_t count = 0;
    const auto put = [&](std::size_t i, std::uint32_t bits) SHOAL_ALWAYS {
      std::memcpy(weights + i, &bits, sizeof bits);
      run.rows[i] = nullptr;
      run.missing[count] = static_cast<std::uint16_t>(i);
      count += (bits << 1U) > 0xff000000U ? 1U : 0U;  // a NaN
    };
    const bool sure = probe_by_low_bits<Form, Lines>(
        by, run,
        [&](std::size_t i, const std::byte* line, const LineFormat& form, std::size_t lane,
            std::uint32_t none)
            SHOAL_ALWAYS { put(i, ScalarRow::bits(line, line + form.row_at(lane)) | none); });
    if (!sure) [[unlikely]] {
      probe_exactly<Form, Lines>(by, run);
      count = 0;
      for (std::size_t i = 0; i < run.size; ++i) {
        put(i, run.rows[i] != nullptr ? ScalarRow::bits(run.lines[i], run.rows[i]) : IndexProbe::kAbsent);
      }
    }
    run.missing_count = count;
    collect_unresolved(run, run.missing.data(), count);
  }

  // The line among [first, first + most], a home and the lines after it, that must hold a hash: the last one whose first hash
  // is not greater, by binary search, because hashes are stored in order. Long displacements arise from colliding hashes
  // that an adversary has chosen; a linear search of them would take quadratic time in all.
  template <class Form>
  static const std::byte* find_line(const IndexProbe& by, const Run& run, const Section& section,
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

  // Reads the lines after the homes until every hash of the run is resolved. Calls found(i, line) for each line that is
  // read for hash i: run.rows[i] is its row, or null.
  template <class Form, class Lines, class Found>
  static SHOAL_INLINE void resolve(const IndexProbe& by, Run& run, const Found& found) noexcept {
    for (std::size_t step = 1; run.unresolved_count != 0; ++step) {
      std::size_t left = 0;
      for (std::size_t k = 0; k < run.unresolved_count; ++k) {
        const std::uint16_t i = run.unresolved[k];  // which is written at `left`, at most k
        const Section& section = by.section_of(run, run.hashes[i]);
        const std::byte* const home = run.lines[i];
        const std::size_t said = std::to_integer<std::size_t>(home[LineFormat::kReach]);
        const auto first = static_cast<std::size_t>(home - section.lines) / kCacheLine;
        const std::size_t most =
            std::min<std::size_t>(said == LineFormat::kFar ? section.reach : said, section.count - 1 - first);
        // A damaged home may name lines beyond the last: then it is read again.
        const bool many = most > kMaxLinearLines;
        const std::byte* const line = many ? find_line<Form>(by, run, section, run.hashes[i], first, most)
                                           : home + std::min(step, most) * kCacheLine;
        run.unresolved[left] = i;
        left += read<Form, Lines>(by, run, i, line, step < most && !many ? 1 : 0);
        prefetch_line(line + kCacheLine);
        found(i, line);
      }
      run.unresolved_count = left;
    }
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void resolve(const IndexProbe& by, Run& run) noexcept {
    resolve<Form, Lines>(by, run, [](std::size_t, const std::byte*) SHOAL_ALWAYS {});
  }

  template <class Form, class Lines, class ScalarRow>
  static SHOAL_INLINE void resolve_scalars(const IndexProbe& by, Run& run, float* weights) noexcept {
    resolve<Form, Lines>(by, run, [&](std::size_t i, const std::byte* line) SHOAL_ALWAYS {
      const std::byte* const row = run.rows[i];
      std::uint32_t bits;
      std::memcpy(&bits, weights + i, sizeof bits);
      bits = row == nullptr ? bits : ScalarRow::bits(line, row);
      std::memcpy(weights + i, &bits, sizeof bits);
    });
  }
};

template <bool kAreInline>
SHOAL_INLINE const LineFormat& AnyWidth<kAreInline>::of(const IndexProbe& by, const Run& run,
                                                        std::uint64_t hash) noexcept {
  return ProbeKernels::form_of(by, run, hash);
}

namespace {

// The kernels of one line format; those for rows of one weight are ScalarKernels.
template <class Form>
struct RowKernels {
  static void probe(const IndexProbe& by, Run& run) noexcept {
    ProbeKernels::probe<Form, PortableLines>(by, run);
  }
  static void resolve(const IndexProbe& by, Run& run) noexcept {
    ProbeKernels::resolve<Form, PortableLines>(by, run);
  }
#if defined(SHOAL_SIMD)
  SHOAL_SIMD static void probe_by_simd(const IndexProbe& by, Run& run) noexcept {
    ProbeKernels::probe<Form, SimdLines>(by, run);
  }
  SHOAL_SIMD static void resolve_by_simd(const IndexProbe& by, Run& run) noexcept {
    ProbeKernels::resolve<Form, SimdLines>(by, run);
  }
#endif
};

template <class Form, class ScalarRow>
struct ScalarKernels {
  static void probe(const IndexProbe& by, Run& run, float* weights) noexcept {
    ProbeKernels::probe_scalars<Form, PortableLines, ScalarRow>(by, run, weights);
  }
  static void resolve(const IndexProbe& by, Run& run, float* weights) noexcept {
    ProbeKernels::resolve_scalars<Form, PortableLines, ScalarRow>(by, run, weights);
  }
#if defined(SHOAL_SIMD)
  SHOAL_SIMD static void probe_by_simd(const IndexProbe& by, Run& run, float* weights) noexcept {
    ProbeKernels::probe_scalars<Form, SimdLines, ScalarRow>(by, run, weights);
  }
  SHOAL_SIMD static void resolve_by_simd(const IndexProbe& by, Run& run, float* weights) noexcept {
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

void Run::prefetch() const noexcept {
  for (std::size_t i = 0; i < std::min(size, kAhead); ++i) {
    prefetch_line(lines[i]);
  }
}

void Run::set_next_lines(std::span<const std::byte* const> next) noexcept {
  const std::span behind(lines.data() + size, kAhead);
  const std::size_t count = std::min(next.size(), kAhead);
  std::copy_n(next.begin(), count, behind.begin());
  std::fill(behind.begin() + static_cast<std::ptrdiff_t>(count), behind.end(), lines[0]);
}

IndexProbe::IndexProbe(const RowFormat& form, Slots slots) noexcept
    : form_(form), slots_(slots), lines_of_row_(lines_of(form.bytes())), kernels_(choose_kernels(form)) {
  for (std::size_t k = 0; k < forms_.size(); ++k) {
    forms_[k] = LineFormat(form, LineFormat::kMinRowBytes + k);
  }
}

void IndexProbe::prepare(const LayerView& layer, Run& run) const noexcept {
  const unsigned bits = slots_.bits();
  run.layer = layer;
  for (std::size_t i = 0; i < run.size; ++i) {
    const std::uint64_t hash = run.hashes[i];
    const SlotIndexView& at = layer.indexes[hash >> (64U - bits)];
    run.lines[i] = at.lines + scale(hash << bits, at.homes) * kCacheLine;
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
