// Factorization machine of second order over one batch: margins, gradient of the factors (Rendle,
// Factorization Machines, ICDM 2010, equations 1 and 5). docs/fm.md has the model.
//
//   margin    a = b + sum of w_k x_k + sum over pairs e < f of <v_e, v_f> x_e x_f, linear in the entries: one
//             pass; s_d is the sum of v_ed x_e over the entries before the current one
//   gradient  of v_kd: sum over k's entries of slope x_k (s_d - v_kd x_k), s_d the example's complete sum
//   sums      examples x dim s, double: computed with the margins, used by the gradient
//
// The paper's form, half of (sum)^2 - sum of squares, suffers from cancellation; the single pass does not.
// Products of two floats are exact in float64, and sums are float64, rounded once, in an order that the data
// alone determine: the bits do not depend on threads or instruction sets.
//
// Threads: no state; the pool shares the work. A key is never divided.

#pragma once

#include <cstddef>
#include <span>

#include "base/threads.h"
#include "kernel/examples.h"
#include "kernel/logistic.h"

namespace shoal {

// Margins a: one for each example. `weights` has one number for each unique key, `factors` has dim.
void fm_margins(const Examples& examples, std::span<const float> weights, std::span<const float> factors,
                std::size_t dim, std::span<double> out, std::span<double> sums, ThreadPool& pool);

// The gradient of each unique key's factors: `out` has dim numbers for each. `factors` and `sums` are those
// of fm_margins.
void fm_gradient(const Examples& examples, std::span<const float> factors, std::size_t dim,
                 std::span<const double> sums, std::span<const double> slopes, Occurrences occurrences,
                 std::span<float> out, ThreadPool& pool, GradientScratch& scratch);

}  // namespace shoal
