// Pooling of embeddings: one row for each bag of keys, forward and backward.
//
// Model. Each unique key of the batch has a row of dim floats; an example (examples.h) is a bag, and its entries are keys. This
// is torch's nn.EmbeddingBag, over rows that were pulled once for each unique key:
//
//   sum      y_i = sum over entries e of v_e x_e        gradient of row v: sum over its entries e of x_e g_i
//   mean     y_i = sum over entries e of v_e / n_i                         sum over its entries e of g_i / n_i
//   max      y_id = greatest of v_ed                                       sum of g_id over the (i, d) that its entries won
//   values   gradient of x_e in a sum: <v_e, g_i>
//
// with g_i the gradient of bag i and n_i its number of entries. A bag without entries gives zeros. Of equal entries the first
// wins, as in torch; a NaN wins if it is the first entry, and a later one never wins.
//
//   rows     unique keys x dim
//   out      bags x dim
//   winners  bags x dim: the entry e that won, for max only; kNoWinner in an empty bag
//
// Arithmetic. Sums are float64 and rounded once: a bag's in the order of its entries, a key's in order of occurrence. So
// the bits depend on the data alone, not on threads or instruction sets.
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

enum class Pooling : std::uint8_t { kSum, kMean, kMax };

inline constexpr std::uint32_t kNoWinner = 0xffffffffU;

// Values require a sum.
void pool_rows(Pooling pooling, const Examples& bags, std::span<const float> rows, std::size_t dim,
               std::span<float> out, std::span<std::uint32_t> winners, ThreadPool& pool);

// The gradient of each unique key's row, from those of the bags: out is unique keys x dim.
void pool_gradient(Pooling pooling, const Examples& bags, std::span<const float> grads,
                   std::span<const std::uint32_t> winners, std::size_t dim, Occurrences occurrences,
                   std::span<float> out, ThreadPool& pool, GradientScratch& scratch);

// The gradient of each value of a sum: out has one number for each entry.
void pool_values_gradient(const Examples& bags, std::span<const float> rows, std::span<const float> grads,
                          std::size_t dim, std::span<float> out, ThreadPool& pool);

}  // namespace shoal
