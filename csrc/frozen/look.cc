#include "frozen/look.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/avx2.h"

namespace shoal {

namespace {

constexpr std::size_t kMostLinesAhead = 8;  // of a row; the machine sees by itself how a longer one goes on

SHOAL_INLINE void fetch_to_read(const std::byte* at) noexcept { __builtin_prefetch(at, 0, 2); }

// Of a row, its first so many lines. Where rows may begin anywhere in a line one more is asked for, up to the last byte.
std::size_t lines_of(std::size_t bytes) noexcept {
  const std::size_t whole = (bytes + kCacheLine - 1) / kCacheLine;
  const bool aligned = bytes % kCacheLine == 0 || kCacheLine % bytes == 0;
  return std::min(whole + (aligned ? 0 : 1), kMostLinesAhead);
}

SHOAL_INLINE void fetch_row(const std::byte* row, std::size_t bytes, std::size_t lines) noexcept {
  for (std::size_t k = 0; k < lines; ++k) {
    fetch_to_read(row + std::min(k * kCacheLine, bytes - 1));
  }
}

// Null where `wanted` is 0 instead of 1.
SHOAL_INLINE const std::byte* only_if(unsigned wanted, const std::byte* row) noexcept {
  const std::uintptr_t all = 0 - std::uintptr_t{wanted};
  return reinterpret_cast<const std::byte*>(reinterpret_cast<std::uintptr_t>(row) & all);
}

struct PortableLines {
  static SHOAL_INLINE unsigned same_low(const std::byte* line, std::uint32_t low) noexcept {
    return LineForm::same_low(line, low);
  }
};

#if defined(__x86_64__)
struct Avx2Lines {
  SHOAL_AVX2 static inline unsigned same_low(const std::byte* line, std::uint32_t low) noexcept {
    const auto* const at = reinterpret_cast<const __m256i*>(line);
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(low));
    const auto mask = [](__m256i same) SHOAL_AVX2 {
      return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(same)));
    };
    return mask(_mm256_cmpeq_epi32(_mm256_load_si256(at), wanted)) |
           mask(_mm256_cmpeq_epi32(_mm256_load_si256(at + 1), wanted)) << 8U;
  }
};
#endif

}  // namespace

// What the loop must know of the lines that it reads.
//
// Of a layer whose sections have one width, which is most: constants.
template <std::size_t kWidth, std::size_t kRow>
struct OneForm {
  static constexpr bool kInside = kRow != 0;
  static constexpr LineForm kForm{kWidth, kRow};

  static SHOAL_INLINE constexpr const LineForm& of(const Look&, const Run&, std::uint64_t) noexcept {
    return kForm;
  }
};

// Of the others.
template <bool kRowsInside>
struct AnyForm {
  static constexpr bool kInside = kRowsInside;

  static SHOAL_INLINE const LineForm& of(const Look& by, const Run& run, std::uint64_t hash) noexcept;
};

// The loops over a run's hashes, once per form of lines and way of comparing.
struct LookSteps {
  static SHOAL_INLINE const LineForm& form_of(const Look& by, const Run& run, std::uint64_t hash) noexcept {
    return by.form_of(by.section_of(run, hash));
  }

  // One hash in one line: 1 where it is neither there nor need be, as a line says of which `more` are behind it. Numbers
  // instead of truth values, of which compilers make branches.
  template <class Form, class Lines>
  static SHOAL_INLINE unsigned read(const Look& by, Run& run, std::size_t i, const std::byte* line,
                                    unsigned more) noexcept {
    const std::uint64_t hash = run.hashes[i];
    const LineForm& form = Form::of(by, run, hash);
    const unsigned match = Lines::same_low(line, static_cast<std::uint32_t>(hash)) & form.lane_mask;
    auto lane = static_cast<std::size_t>(std::countr_zero(match)) % 32;  // 0 of no match
    std::uint32_t high;
    std::memcpy(&high, line + form.high_at(lane), sizeof high);
    const std::uint32_t other = (high ^ static_cast<std::uint32_t>(hash >> 32U)) & form.high_mask;
    const unsigned filled = line[LineForm::kReach] == std::byte{LineForm::kEmpty} ? 0 : 1;
    unsigned here = (match == 0 ? 0U : 1U) & filled;
    // One in 2^28 lines: the low bits of two hashes are the same. A bit trick, for of `other != 0` there would be a branch
    // as well, which waits for the line and guesses wrong for each hash behind its home.
    if ((here & ((other | (0U - other)) >> 31U)) != 0) [[unlikely]] {
      const unsigned exact = form.find(line, hash);
      here = exact != LineForm::kNone ? 1 : 0;
      lane = exact % LineForm::kNone;
    }
    if constexpr (Form::kInside) {
      run.rows[i] = only_if(here, line + form.row_at(lane));
    } else {
      const Section& section = by.section_of(run, hash);
      std::uint32_t number;
      std::memcpy(&number, line + LineForm::kFirstRow, sizeof number);
      const std::uint64_t at = std::uint64_t{number} + lane;
      const unsigned there = here & (at < section.rows_count ? 1U : 0U);
      run.rows[i] = only_if(there, section.rows() + at * by.form_.bytes());
      fetch_row(there != 0 ? run.rows[i] : line, by.form_.bytes(), by.lines_of_row_);
    }
    return (here ^ 1U) & (more != 0 ? 1U : 0U);
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void look(const Look& by, Run& run) noexcept {
    const std::size_t size = run.size;
    std::size_t rest_count = 0;
    for (std::size_t i = 0; i < size; ++i) {
      fetch_to_read(run.lines[i + Run::kAhead]);
      const std::byte* const line = run.lines[i];
      const auto reach = std::to_integer<unsigned>(line[LineForm::kReach]);
      const unsigned rest = read<Form, Lines>(by, run, i, line, (reach + 1) & 0xfeU);
      run.rest[rest_count] = static_cast<std::uint16_t>(i);
      rest_count += rest;
    }
    run.rest_count = rest_count;
    for (std::size_t k = 0; k < rest_count; ++k) {
      fetch_to_read(run.lines[run.rest[k]] + kCacheLine);
    }
  }

  template <class Form, class Lines>
  static SHOAL_INLINE void settle(const Look& by, Run& run) noexcept {
    for (std::size_t step = 1; run.rest_count != 0; ++step) {
      std::size_t left = 0;
      for (std::size_t k = 0; k < run.rest_count; ++k) {
        const std::uint16_t i = run.rest[k];  // which is written at `left`, at most k
        const Section& section = by.section_of(run, run.hashes[i]);
        const std::byte* const home = run.lines[i];
        const std::size_t said = std::to_integer<std::size_t>(home[LineForm::kReach]);
        const auto first = static_cast<std::size_t>(home - section.lines) / kCacheLine;
        const std::size_t most =
            std::min<std::size_t>(said == LineForm::kFar ? section.reach : said, section.count - 1 - first);
        // A damaged home may say that lines are behind it where there are none: then it is read again.
        const std::byte* const line = home + std::min(step, most) * kCacheLine;
        run.rest[left] = i;
        left += read<Form, Lines>(by, run, i, line, step < most ? 1 : 0);
        fetch_to_read(line + kCacheLine);
      }
      run.rest_count = left;
    }
  }
};

template <bool kRowsInside>
SHOAL_INLINE const LineForm& AnyForm<kRowsInside>::of(const Look& by, const Run& run,
                                                      std::uint64_t hash) noexcept {
  return LookSteps::form_of(by, run, hash);
}

namespace {

template <class Form>
void look_portably(const Look& by, Run& run) noexcept {
  LookSteps::look<Form, PortableLines>(by, run);
}

template <class Form>
void settle_portably(const Look& by, Run& run) noexcept {
  LookSteps::settle<Form, PortableLines>(by, run);
}

#if defined(__x86_64__)
template <class Form>
SHOAL_AVX2 void look_by_avx2(const Look& by, Run& run) noexcept {
  LookSteps::look<Form, Avx2Lines>(by, run);
}

template <class Form>
SHOAL_AVX2 void settle_by_avx2(const Look& by, Run& run) noexcept {
  LookSteps::settle<Form, Avx2Lines>(by, run);
}
#endif

template <class Form>
Look::Steps choose([[maybe_unused]] bool by_avx2) noexcept {
#if defined(__x86_64__)
  if (by_avx2) {
    return {&look_by_avx2<Form>, &settle_by_avx2<Form>};
  }
#endif
  return {&look_portably<Form>, &settle_portably<Form>};
}

// By width, from LineForm::kNarrowest on; the last one for any.
template <std::size_t kRow>
Look::Ways choose_each(bool by_avx2) noexcept {
  return {choose<OneForm<5, kRow>>(by_avx2), choose<OneForm<6, kRow>>(by_avx2),
          choose<OneForm<7, kRow>>(by_avx2), choose<OneForm<8, kRow>>(by_avx2),
          choose<AnyForm<kRow != 0>>(by_avx2)};
}

Look::Ways choose_ways(std::size_t row_inside, bool by_avx2) noexcept {
  switch (row_inside) {
    case 0:
      return choose_each<0>(by_avx2);
    case 1:
      return choose_each<1>(by_avx2);
    case 2:
      return choose_each<2>(by_avx2);
    default:
      return choose_each<4>(by_avx2);
  }
}

}  // namespace

void Run::fetch() const noexcept {
  for (std::size_t i = 0; i < std::min(size, kAhead); ++i) {
    fetch_to_read(lines[i]);
  }
}

void Run::go_on_with(std::span<const std::byte* const> next) noexcept {
  const std::span behind(lines.data() + size, kAhead);
  const std::size_t count = std::min(next.size(), kAhead);
  std::copy_n(next.begin(), count, behind.begin());
  std::fill(behind.begin() + static_cast<std::ptrdiff_t>(count), behind.end(), lines[0]);
}

Look::Look(const RowForm& form, Slots slots) noexcept
    : form_(form),
      slots_(slots),
      lines_of_row_(lines_of(form.bytes())),
      ways_(choose_ways(form.inside() ? form.bytes() : 0, form.by_avx2())) {
  for (std::size_t k = 0; k < forms_.size(); ++k) {
    forms_[k] = LineForm(form, LineForm::kNarrowest + k);
  }
}

void Look::aim(const Homestead* homesteads, const Section* sections, Run& run) const noexcept {
  const unsigned bits = slots_.bits();
  run.sections = sections;
  for (std::size_t i = 0; i < run.size; ++i) {
    const std::uint64_t hash = run.hashes[i];
    const Homestead& at = homesteads[hash >> (64U - bits)];
    run.lines[i] = at.lines + scale(hash << bits, at.homes) * kCacheLine;
  }
}

const std::byte* Look::row_of(const Section& section, const std::byte* line, unsigned lane) const noexcept {
  if (form_.inside()) {
    return line + form_of(section).row_at(lane);
  }
  std::uint32_t number;
  std::memcpy(&number, line + LineForm::kFirstRow, sizeof number);
  const std::uint64_t row = std::uint64_t{number} + lane;
  return row < section.rows_count ? section.rows() + row * form_.bytes() : nullptr;
}

}  // namespace shoal
