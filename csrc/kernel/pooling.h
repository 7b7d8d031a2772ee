// Pooling of embeddings: one row for each bag of keys, forward and backward.
//
// Model. Each unique key of the batch has a row of dim floats; an example (examples.h) is a bag, and its entries are keys with
// values. This is torch's nn.EmbeddingBag, with values in every mode, over rows that were pulled once for each unique key:
//
//            bag i                          divisor D_i            gradient of row v        gradient of value x_e
//   sum      y_i = (sum of x_e v_e) / D_i   1                      sum of x_e g_i / D_i     <v_e, g_i>
//   mean     as a sum                       sum of x_e             as of a sum              <v_e - y_i, g_i> / D_i
//   sqrtn    as a sum                       root of sum of x_e^2   as of a sum              <v_e - x_e / D_i y_i, g_i> / D_i
//   max      y_id = greatest of x_e v_ed                           sum of won x_e g_id      sum of won v_ed g_id
//
// with g_i the gradient of bag i; the sums of a bag are over its entries e, those of a gradient over the entries of the row,
// *won* ones over the (i, d) that these have won. These are TensorFlow's combiners: without values D_i is the number of entries,
// or its root. A bag without entries gives zeros, and so does one whose divisor is 0, with gradients of 0. Of equal products,
// as float32, the first wins, as in torch; a NaN wins if it is the first entry, and a later one never wins.
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
