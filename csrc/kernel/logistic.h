// Logistic regression over one batch: margins, losses, gradient, from the weights of its unique keys.
//
//   p = 1 / (1 + e^-a) for a margin a >= 0, else e^a / (1 + e^a)
//   loss = max(a, 0) - a y + log1p(e^-|a|)
//   slope = dloss/da = p for y = 0, -1 / (1 + e^a) for y = 1, times the example's weight
//   gradient of key k = sum over examples of slope x value (a sum, not a mean)
//
// Arithmetic. Sums are float64. A margin adds an example's entries in four interleaved sums, a gradient adds
// a key's entries in order of occurrence and is rounded once, and losses are added in blocks of kLossBlock
// examples. The data alone determine each order, so the bits do not depend on the number of threads.
//
// Threads: no state; the pool shares the work.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/threads.h"
#include "kernel/examples.h"

namespace shoal {

inline constexpr std::size_t kLossBlock = 1024;

// Margins a: one for each example. `weights` has one number for each unique key.
void margins(const Examples& examples, std::span<const float> weights, std::span<double> out,
             ThreadPool& pool);

// Throws unless there is a label, 0 or 1, for each example, and a finite weight that is not negative, or no
// weights.
void check_labels(std::span<const float> labels, std::span<const float> weights, std::size_t examples);

// Writes the losses of the examples, times their weights, and their slopes likewise; returns the sum of the
// losses. Labels are 0 or 1. Example weights are finite and not negative, one for each example; empty: each
// is 1.
double losses(std::span<const double> margins, std::span<const float> labels, std::span<const float> weights,
              std::span<double> slopes, ThreadPool& pool);

// The same without slopes.
double losses(std::span<const double> margins, std::span<const float> labels, std::span<const float> weights,
              ThreadPool& pool);

// Probabilities p of label 1.
void probabilities(std::span<const double> margins, std::span<double> out, ThreadPool& pool);

// Working memory for the gradients of this kernel and of fm.h; reuse it. Serves one call at a time.
struct GradientScratch {
  Buffer<double> numbers;
  Buffer<std::uint32_t> owners;
};

// The gradient of each unique key: `out` has one number for each. A key without entries gets 0.
void gradient(const Examples& examples, std::span<const double> slopes, Occurrences occurrences,
              std::span<float> out, ThreadPool& pool, GradientScratch& scratch);

}  // namespace shoal
