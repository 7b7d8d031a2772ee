#include "shard/reductions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "shard/user_function.h"

namespace shoal {

namespace {

// A function with its parameters, checked.
struct Call {
  Function function;
  double parameter = 0;
  Elements elements = Elements::kFloat32;
};

Call checked(const Shard& shard, Function function, std::span<const double> parameters) {
  const std::size_t takes = function == Function::kSum || function == Function::kDigest ? 0 : 1;
  SHOAL_CHECK((function >= Function::kSum && function <= Function::kDigest) || function == Function::kRate,
              "there is no function " + std::to_string(static_cast<std::uint32_t>(function)) + " of a table");
  SHOAL_CHECK(parameters.size() == takes, "function " + std::to_string(static_cast<std::uint32_t>(function)) +
                                              " takes " + std::to_string(takes) + " parameters, got " +
                                              std::to_string(parameters.size()));
  const Elements elements = shard.spec().optimizer.elements();
  if (takes == 0) {
    return {.function = function, .elements = elements};
  }
  const double p = parameters[0];
  const std::string got = ", got " + std::to_string(p);
  switch (function) {
    case Function::kNorm:
      SHOAL_CHECK(p == 1 || p == 2 || p == std::numeric_limits<double>::infinity(),
                  "the order of a norm is 1, 2 or infinity" + got);
      break;
    case Function::kCount:
      SHOAL_CHECK(p >= 0, "rows are counted above a norm of 0 or more" + got);
      break;
    case Function::kTopK:
      SHOAL_CHECK(p >= 1 && p <= static_cast<double>(kMaxTopK) && p == std::floor(p),
                  "k must be a whole number from 1 to " + std::to_string(kMaxTopK) + got);
      break;
    case Function::kDecay:
      SHOAL_CHECK(p > 0 && p <= 1, "a decay's factor must be above 0 and at most 1" + got);
      break;
    case Function::kRate:
      SHOAL_CHECK(p > 0 && std::isfinite(p), "the factor of a rate must be finite and above 0" + got);
      SHOAL_CHECK(shard.spec().optimizer.has_rate(),
                  shard.spec().optimizer.name() + " has no learning rate that can change");
      return {.function = function, .parameter = p, .elements = elements};
    default:
      SHOAL_CHECK(p >= 0 && std::isfinite(p), "a shrink's l1 must be finite and not negative" + got);
  }
  SHOAL_CHECK(!changes(function) || !shard.spec().optimizer.pairs(),
              "rows of this table are a weight and its gradient: only a step may change them");
  SHOAL_CHECK(function < Function::kDecay || function == Function::kDigest || elements == Elements::kFloat32,
              "decay and shrink multiply and subtract floats, and this table has int64: use apply() with a "
              "function");
  return {.function = function, .parameter = p, .elements = elements};
}

// Calls use(weight) for each number of a row, as float64.
template <class Use>
void each_weight(std::span<const float> row, Elements elements, const Use& use) noexcept {
  if (elements == Elements::kInt64Pairs) {
    for (std::size_t e = 0; e < row.size(); e += kInt64Floats) {
      use(int64_as_double(row.data() + e));
    }
  } else {
    for (const float w : row) {
      use(static_cast<double>(w));
    }
  }
}

double norm_of(std::span<const float> row, Elements elements) noexcept {
  double squares = 0;
  each_weight(row, elements, [&](double w) { squares += w * w; });
  return std::sqrt(squares);
}

constexpr std::size_t kMinCounted = 4096;  // above this number, candidates are reduced to k

struct Candidate {
  double norm;
  std::uint64_t hash;
};

// A total order: every key occurs once.
bool before(const Candidate& a, const Candidate& b) noexcept {
  return a.norm != b.norm ? a.norm > b.norm : unmix(a.hash) < unmix(b.hash);
}

void drop_all_but_best(std::vector<Candidate>& candidates, std::size_t k) {
  if (candidates.size() > k) {
    std::nth_element(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(k),
                     candidates.end(), before);
    candidates.resize(k);
  }
}

// The best first, as pairs.
std::vector<double> sorted(std::vector<Candidate>& candidates) {
  std::sort(candidates.begin(), candidates.end(), before);
  std::vector<double> answers;
  for (const Candidate& candidate : candidates) {
    answers.push_back(candidate.norm);
    answers.push_back(std::bit_cast<double>(candidate.hash));
  }
  return answers;
}

// Adds a row's result to its slot's: a number per weight for sum, one number otherwise.
void answer(const Call& call, std::span<const float> row, double* to) noexcept {
  if (call.function == Function::kSum && call.elements == Elements::kInt64Pairs) {
    for (std::size_t e = 0; e < row.size(); e += kInt64Floats, ++to) {
      *to = std::bit_cast<double>(std::bit_cast<std::uint64_t>(*to) + load_int64(row.data() + e));
    }
  } else if (call.function == Function::kSum) {
    for (std::size_t e = 0; e < row.size(); ++e) {
      to[e] += static_cast<double>(row[e]);
    }
  } else if (call.function == Function::kCount) {
    *to += norm_of(row, call.elements) > call.parameter ? 1 : 0;
  } else {
    each_weight(row, call.elements, [&](double weight) {
      const double size = std::abs(weight);
      *to =
          call.parameter == 1 ? *to + size : (call.parameter == 2 ? *to + size * size : std::max(*to, size));
    });
  }
}

// Whether the order of a slot's rows changes no bit of the result.
bool is_of_any_order(const Call& call) noexcept {
  return call.function == Function::kCount || call.function == Function::kTopK ||
         (call.function == Function::kNorm && std::isinf(call.parameter));
}

// Calls ask(part, slot, hash, weights) for every row in `parts` threads; each processes adjacent slots in
// ascending order, and a slot's rows in hash order unless the call gives the same bits in any order.
template <class Ask>
void each_row(const Shard& shard, const Call& call, std::size_t first, std::size_t end, std::size_t parts,
              const Ask& ask) {
  const Partition partition{end - first, parts};
  const std::size_t dim = shard.rows().dim();
  const std::size_t width =
      shard.spec().optimizer.pairs() ? 1 : dim;  // how many elements of a row are weights
  shard.pool().run(parts, [&](std::size_t part) {
    std::vector<std::uint64_t> hashes;
    std::vector<float> weights;
    for (std::size_t s = first + partition.begin(part); s < first + partition.begin(part + 1); ++s) {
      const Slot slot{static_cast<std::uint32_t>(s)};
      shard.read_slot_in_memory(slot, !is_of_any_order(call), hashes, weights);
      for (std::size_t r = 0; r < hashes.size(); ++r) {
        ask(part, s, hashes[r], std::span<const float>(weights).subspan(r * dim, width));
      }
    }
  });
}

std::vector<double> top(const Shard& shard, const Call& call, std::size_t first, std::size_t end,
                        std::size_t parts) {
  const auto k = static_cast<std::size_t>(call.parameter);
  std::vector<std::vector<Candidate>> best(parts);
  each_row(shard, call, first, end, parts,
           [&](std::size_t part, std::size_t /*slot*/, std::uint64_t hash, std::span<const float> weights) {
             best[part].push_back({norm_of(weights, call.elements), hash});
             if (best[part].size() >= 2 * k + kMinCounted) {
               drop_all_but_best(best[part], k);
             }
           });
  std::vector<Candidate> candidates;
  for (auto& of_part : best) {
    drop_all_but_best(of_part, k);
    candidates.insert(candidates.end(), of_part.begin(), of_part.end());
  }
  drop_all_but_best(candidates, k);
  return sorted(candidates);
}

std::vector<double> digests(const Shard& shard, std::size_t first, std::size_t end, std::size_t parts) {
  constexpr std::size_t kWords = 4;
  constexpr std::uint64_t kLow = 0xffffffffU;
  std::vector<double> answers((end - first) * kWords);
  const Partition partition{end - first, parts};
  shard.pool().run(parts, [&](std::size_t part) {
    for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
      const auto sums = shard.digest(Slot{static_cast<std::uint32_t>(first + s)});
      for (std::size_t word = 0; word < kWords; ++word) {
        answers[s * kWords + word] = static_cast<double>((sums[word / 2] >> (word % 2 * 32U)) & kLow);
      }
    }
  });
  return answers;
}

void decay(std::span<float> weights, double factor) noexcept {
  for (float& w : weights) {
    w = static_cast<float>(factor * static_cast<double>(w));
  }
}

void shrink_all(std::span<float> weights, double l1) noexcept {
  for (float& w : weights) {
    const double left = std::abs(static_cast<double>(w)) - l1;
    w = left > 0 ? std::copysign(static_cast<float>(left), w) : 0.0F;
  }
}

}  // namespace

std::vector<double> join(Function function, std::span<const double> parameters,
                         std::span<const std::vector<double>> parts) {
  std::vector<double> results;
  for (const auto& part : parts) {
    results.insert(results.end(), part.begin(), part.end());
  }
  if (function != Function::kTopK || parts.size() < 2) {
    return results;
  }
  std::vector<Candidate> best;
  for (std::size_t i = 0; i < results.size(); i += 2) {
    best.push_back({results[i], std::bit_cast<std::uint64_t>(results[i + 1])});
  }
  drop_all_but_best(best, static_cast<std::size_t>(parameters[0]));
  return sorted(best);
}

bool changes(Function function) noexcept {
  return function == Function::kDecay || function == Function::kShrink || function == Function::kApply ||
         function == Function::kRate;
}

namespace {

// Of slots whose rows are in memory.
std::vector<double> reduce_slots(Shard& shard, Function function, std::span<const double> parameters,
                                 std::size_t first, std::size_t end) {
  if (function == Function::kMap || function == Function::kApply) {
    return run_user_function(shard, function == Function::kApply, parameters, first, end);
  }
  const Call call = checked(shard, function, parameters);
  if (changes(function)) {
    std::vector<double> answers(end - first);  // before anything changes: may throw std::bad_alloc
    const auto moved = transform_weights(shard, first, end, [&call](std::span<float> weights) {
      call.function == Function::kDecay ? decay(weights, call.parameter)
                                        : shrink_all(weights, call.parameter);
    });
    std::copy(moved.begin(), moved.end(), answers.begin());
    return answers;
  }
  const std::size_t parts =
      parts_for(end - first, 1, shard.pool().threads() == 1 ? 1 : 4 * shard.pool().threads());
  if (function == Function::kTopK) {
    return top(shard, call, first, end, parts);
  }
  if (function == Function::kDigest) {
    return digests(shard, first, end, parts);
  }
  const std::size_t numbers =
      shard.rows().dim() / (call.elements == Elements::kInt64Pairs ? kInt64Floats : 1);
  const std::size_t width = function == Function::kSum && !shard.spec().optimizer.pairs() ? numbers : 1;
  std::vector<double> answers((end - first) * width);
  each_row(
      shard, call, first, end, parts,
      [&](std::size_t /*part*/, std::size_t slot, std::uint64_t /*hash*/, std::span<const float> weights) {
        answer(call, weights, answers.data() + (slot - first) * width);
      });
  return answers;
}

}  // namespace

std::vector<double> reduce(Shard& shard, Function function, std::span<const double> parameters,
                           std::size_t first, std::size_t end) {
  const bool is_users = function == Function::kMap || function == Function::kApply;
  if (!is_users) {
    checked(shard, function, parameters);
  }
  SHOAL_CHECK(first <= end && first >= shard.first_slot() && end <= shard.end_slot(),
              "there are no such slots");
  if (function == Function::kRate) {
    std::vector<double> nothing(end - first);  // before the change: may throw std::bad_alloc
    shard.set_rate(parameters[0]);
    return nothing;
  }
  std::vector<std::vector<double>> parts;
  parts.reserve(end - first);  // before anything changes: may throw std::bad_alloc
  shard.core().with_slots(first, end, changes(function), [&](std::size_t from, std::size_t to) {
    parts.push_back(reduce_slots(shard, function, parameters, from, to));
    return !is_users || !user_function_failed(parts.back());
  });
  return parts.size() == 1 ? std::move(parts.front()) : join(function, parameters, parts);
}

}  // namespace shoal
