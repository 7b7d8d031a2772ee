// From margins to probabilities: calibration, the logistic function of several classes.
//
//   Platt      slope x margin + intercept
//   isotonic   p linear in the margin between points, constant beyond them; the margin is ln p - ln(1 - p)
//   softmax    p_k = e^(a_k - max a) / sum of them
//   ovr        the same of log s_k, s_k = 1 / (1 + e^-a_k): p_k = s_k / sum of s
//
// Training and every kind of prediction use these, so that they give the same bits.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <span>

namespace shoal {

void platt(std::span<double> margins, double slope, double intercept) noexcept;

// `at` ascends strictly; as many probabilities, at least one, each between 0 and 1.
void isotonic(std::span<double> margins, std::span<const double> at,
              std::span<const double> probabilities) noexcept;

enum class ClassLoss { kMultinomial, kOneVersusRest };

// Replaces the margins of examples, `classes` of each, by the probabilities of the classes.
void class_probabilities(std::span<double> margins, std::size_t classes, ClassLoss loss) noexcept;

}  // namespace shoal
