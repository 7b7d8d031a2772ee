// SIMD by run-time dispatch instead of compiler flags: one wheel runs on any x86-64 machine.
//
// SHOAL_CLONES before a function compiles it once per instruction set; the loader chooses one. The bodies are
// plain loops of IEEE operations compiled without contraction, so every clone gives the same bits. Where the
// loader cannot choose (other architectures, other C libraries, sanitizers, which must start first) or the
// compiler cannot clone (clang before 18) there is one body, and SHOAL_CLONES_CHOSEN is not defined.

#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(SHOAL_SANITIZED) &&                                        \
    (!defined(__clang__) || __clang_major__ >= 18)
#define SHOAL_CLONES_CHOSEN
#define SHOAL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHOAL_CLONES
#endif

// For formulas that such loops call: they must be inlined into each clone.
#define SHOAL_INLINE inline __attribute__((always_inline))
// The same, after the parameters of a lambda.
#define SHOAL_ALWAYS __attribute__((always_inline))
