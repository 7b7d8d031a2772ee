// Factorization machine of second order over one batch: margins, gradient of the factors.
//
// Model. In addition to its weight w_k each unique key has dim factors v_k; two features of an example interact by the inner
// product of their factors. (Rendle, Factorization Machines, ICDM 2010, equations 1 and 5.)
//
//   margin    a = b + sum of w_k x_k + sum over pairs e < f of <v_e, v_f> x_e x_f
//             linear in the entries: one pass; s_d is the sum of v_ed x_e over the entries before the current one
//   gradient  of v_kd: sum over k's entries of slope x_k (s_d - v_kd x_k), where s_d is the example's complete sum
//   gradient  of b and w_k: that of logistic regression, from the same slopes
//
// The paper's form, half of (sum)^2 - sum of squares, suffers from cancellation; the single pass does not, and an example of
// one feature has an interaction of exactly 0 and factors of gradient exactly 0. An entry is a feature: a key that occurs twice
// in an example interacts with itself. The bias has no factors: its gradient is 0.
//
//   factors  keys x dim     v, float
//   sums     examples x dim s, double: computed with the margins, used by the gradient
//
// Arithmetic. Products of two floats are exact in float64, and sums are float64. An example sums its entries front to back, a
// key its entries in order of occurrence, rounded once. The data alone determine each order, so the bits do not depend on
// threads or instruction sets (the loops run over factors, which are combined only at the end of an example).
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

// The gradient of each unique key's factors: `out` has dim numbers for each. `factors` and `sums` are those of
// fm_margins.
void fm_gradient(const Examples& examples, std::span<const float> factors, std::size_t dim,
                 std::span<const double> sums, std::span<const double> slopes, Occurrences occurrences,
                 std::span<float> out, ThreadPool& pool, GradientScratch& scratch);

}  // namespace shoal
