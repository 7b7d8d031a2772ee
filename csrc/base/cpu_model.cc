// The instruction sets of this processor, for compilers whose runtime reports none (SHOAL_CPU_MODEL; zig's is
// one).
//
// __builtin_cpu_supports() and the resolvers of SHOAL_CLONES read __cpu_model and __cpu_features2, which
// __cpu_indicator_init() fills; libgcc and LLVM's compiler-rt define the three with these names and bits.
// Here only the bits are set that the engine asks for: those of the enumeration below. An instruction set
// whose registers the operating system does not save (XGETBV) counts as absent.
//
// Resolvers run while the library is relocated, before its constructors: the code calls nothing and reads no
// other data.

#if defined(SHOAL_CPU_MODEL) && defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

#define SHOAL_RUNTIME extern "C" __attribute__((visibility("hidden")))

namespace shoal {

namespace {

// The numbers of libgcc and compiler-rt, after which a bit is in __cpu_model.features, or from 32 on in
// __cpu_features2.
enum Feature : unsigned {
  kSse42 = 8,
  kAvx = 9,
  kAvx2 = 10,
  kAvx512F = 15,
  kBmi = 16,
  kPclmul = 19,
  kAvx512Vl = 20,
  kAvx512Bw = 21,
  kAvx512Vbmi2 = 31,
  kVpclmulqdq = 33,
  kX8664V2 = 96,
  kX8664V3 = 97,
  kX8664V4 = 98,
};

constexpr unsigned kWords = 5;

struct CpuModel {
  unsigned vendor;
  unsigned type;
  unsigned subtype;
  unsigned features;
};

// Whether each bit of `numbers` is set.
template <class... Numbers>
constexpr bool has(unsigned word, Numbers... numbers) noexcept {
  return (((word >> numbers & 1U) != 0) && ...);
}

// The states of registers that the operating system saves.
inline unsigned saved_states() noexcept {
  unsigned low;
  unsigned high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

inline void detect(unsigned* words) noexcept {
  unsigned eax;
  unsigned ebx;
  unsigned base_c;
  unsigned base_d;
  __cpuid(0, eax, ebx, base_c, base_d);
  const unsigned last = eax;
  if (last < 1) {
    return;
  }
  __cpuid(1, eax, ebx, base_c, base_d);
  unsigned more_b = 0;
  unsigned more_c = 0;
  if (last >= 7) {
    unsigned more_d;
    __cpuid_count(7, 0, eax, more_b, more_c, more_d);
  }
  unsigned extended_c = 0;
  unsigned extended_last;
  unsigned extended_d;
  __cpuid(0x80000000U, extended_last, ebx, extended_c, extended_d);
  if (extended_last >= 0x80000001U) {
    __cpuid(0x80000001U, eax, ebx, extended_c, extended_d);
  } else {
    extended_c = 0;
  }

  constexpr unsigned kOsXsave = 27;
  constexpr unsigned kXmmYmm = 0x06;
  constexpr unsigned kMasksZmm = 0xe0;
  const unsigned states = has(base_c, kOsXsave) ? saved_states() : 0;
  const bool ymm = (states & kXmmYmm) == kXmmYmm;
  const bool zmm = ymm && (states & kMasksZmm) == kMasksZmm;

  const auto add = [words](Feature feature, bool supported) __attribute__((always_inline)) {
    words[feature / 32] |= supported ? 1U << feature % 32 : 0U;
    return supported;
  };
  const bool sse42 = add(kSse42, has(base_c, 20));
  add(kPclmul, has(base_c, 1));
  const bool avx = add(kAvx, ymm && has(base_c, 28));
  const bool avx2 = add(kAvx2, avx && has(more_b, 5));
  const bool bmi = add(kBmi, has(more_b, 3));
  const bool avx512f = add(kAvx512F, zmm && has(more_b, 16));
  const bool avx512bw = add(kAvx512Bw, zmm && has(more_b, 30));
  const bool avx512vl = add(kAvx512Vl, zmm && has(more_b, 31));
  add(kAvx512Vbmi2, zmm && has(more_c, 6));
  add(kVpclmulqdq, ymm && has(more_c, 10));

  // The levels of the x86-64 psABI. In the first word: SSE3, SSSE3, CMPXCHG16B, SSE4.1 and POPCNT; FMA, MOVBE
  // and F16C. BMI2; AVX-512 CD and DQ. LAHF; LZCNT.
  const bool v2 = add(kX8664V2, sse42 && has(base_c, 0, 9, 13, 19, 23) && has(extended_c, 0));
  const bool v3 =
      add(kX8664V3, v2 && avx2 && bmi && has(base_c, 12, 22, 29) && has(more_b, 8) && has(extended_c, 5));
  add(kX8664V4, v3 && avx512f && avx512bw && avx512vl && has(more_b, 17, 28));
}

}  // namespace

}  // namespace shoal

SHOAL_RUNTIME int __cpu_indicator_init() noexcept;
SHOAL_RUNTIME shoal::CpuModel __cpu_model;
SHOAL_RUNTIME unsigned __cpu_features2[shoal::kWords - 1];

shoal::CpuModel __cpu_model;
unsigned __cpu_features2[shoal::kWords - 1];

// Before constructors that ask; resolvers call it earlier.
__attribute__((constructor(101))) int __cpu_indicator_init() noexcept {
  unsigned words[shoal::kWords] = {};
  shoal::detect(words);
  for (unsigned i = 1; i < shoal::kWords; ++i) {
    __cpu_features2[i - 1] = words[i];
  }
  __cpu_model.features = words[0];
  return 0;
}
#endif
