// Pooling of embeddings: one row for each bag of keys, forward and backward: torch's nn.EmbeddingBag, with
// values in every mode, over rows that were pulled once for each unique key (pooling.cc has the formulas).
//
//   rows     unique keys x dim
//   out      bags x dim
//   winners  bags x dim: the entry e that won, for max only; kNoWinner in an empty bag
//
// Arithmetic. Sums are float64 and rounded once: a bag's in the order of its entries, a key's in order of
// occurrence. So the bits depend on the data alone, not on threads or instruction sets.
//
// Threads: no state; the pool divides the bags forward, and the unique keys backward.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/threads.h"
#include "kernel/examples.h"
#include "kernel/logistic.h"

namespace shoal {

enum class Pooling : std::uint8_t { kSum, kMean, kSqrtn, kMax };

inline constexpr std::uint32_t kNoWinner = 0xffffffffU;

void pool_rows(Pooling pooling, const Examples& bags, std::span<const float> rows, std::size_t dim,
               std::span<float> out, std::span<std::uint32_t> winners, ThreadPool& pool);

// The gradient of each unique key's row, from those of the bags: out is unique keys x dim.
void pool_gradient(Pooling pooling, const Examples& bags, std::span<const float> grads,
                   std::span<const std::uint32_t> winners, std::size_t dim, Occurrences occurrences,
                   std::span<float> out, ThreadPool& pool, GradientScratch& scratch);

// The gradient of each value: out has one number for each entry.
void pool_values_gradient(Pooling pooling, const Examples& bags, std::span<const float> rows,
                          std::span<const float> grads, std::span<const std::uint32_t> winners,
                          std::size_t dim, std::span<float> out, ThreadPool& pool);

}  // namespace shoal
