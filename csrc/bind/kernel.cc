#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/unique_keys.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "kernel/binary_metrics.h"
#include "kernel/by_feature.h"
#include "kernel/calibration.h"
#include "kernel/count_min.h"
#include "kernel/fm.h"
#include "kernel/interactions.h"
#include "kernel/logistic.h"
#include "kernel/pooling.h"

namespace shoal::bind {

namespace {

using Floats = std::optional<Array<float>>;
using Doubles = std::optional<Array<double>>;

template <class Number>
std::span<const Number> in_or_empty(const std::optional<Array<Number>>& array) {
  return array ? in(*array) : std::span<const Number>{};
}

// The keys of the batch are those of the entries, followed by the bias's key once if there is a bias.
Examples examples_of(const Array<std::int64_t>& indptr, const Floats& values,
                     std::span<const std::uint32_t> columns, std::size_t keys, bool bias) {
  SHOAL_CHECK(!bias || !columns.empty(), "a batch with a bias ends with the bias key");
  return {.indptr = in(indptr),
          .columns = bias ? columns.first(columns.size() - 1) : columns,
          .values = in_or_empty(values),
          .bias = bias ? std::optional(columns.back()) : std::nullopt,
          .below = keys};
}

Examples examples_of(const Array<std::int64_t>& indptr, const Floats& values, const KeyBatch& batch,
                     bool bias) {
  return examples_of(indptr, values, batch.inverse(), batch.size(), bias);
}

Array<double> logistic_margins(const Array<std::int64_t>& indptr, const Floats& values, const KeyBatch& batch,
                               bool bias, const Array<float>& weights, PoolWithScratch& pool) {
  const Examples examples = examples_of(indptr, values, batch, bias);
  Array<double> result = fresh<double>(examples.size());
  const auto to = out(result);
  const auto input = in(weights);
  const py::gil_scoped_release nogil;
  margins(examples, input, to, pool.threads);
  return result;
}

py::tuple logistic_losses(const Array<double>& margins, const Array<float>& labels, const Floats& weights,
                          PoolWithScratch& pool) {
  Array<double> slopes = fresh<double>(static_cast<std::size_t>(margins.size()));
  const auto to = out(slopes);
  const auto from = in(margins);
  const auto truth = in(labels);
  const auto scale = in_or_empty(weights);
  double sum = 0;
  {
    const py::gil_scoped_release nogil;
    sum = losses(from, truth, scale, to, pool.threads);
  }
  return py::make_tuple(sum, slopes);
}

Array<float> logistic_gradient(const Array<std::int64_t>& indptr, const Floats& values, const KeyBatch& batch,
                               bool bias, const Array<double>& slopes, PoolWithScratch& pool) {
  const Examples examples = examples_of(indptr, values, batch, bias);
  Array<float> result = fresh<float>(batch.size());
  const auto to = out(result);
  const auto from = in(slopes);
  const py::gil_scoped_release nogil;
  pool.with_scratch([&](KeyBatchScratch& /*unused*/, GradientScratch& scratch) {
    gradient(examples, from, {batch.order(), batch.group_offsets()}, to, pool.threads, scratch);
    return 0;
  });
  return result;
}

Array<double> logistic_probabilities(const Array<double>& margins, PoolWithScratch& pool) {
  Array<double> result = fresh<double>(static_cast<std::size_t>(margins.size()));
  const auto to = out(result);
  const auto from = in(margins);
  const py::gil_scoped_release nogil;
  probabilities(from, to, pool.threads);
  return result;
}

Array<double> isotonic_margins(const Array<double>& margins, const Array<double>& at,
                               const Array<double>& probabilities) {
  const auto from = in(margins);
  const auto points = in(at);
  const auto levels = in(probabilities);
  SHOAL_CHECK(!points.empty() && points.size() == levels.size(),
              "there must be a probability for each point");
  Array<double> result = fresh<double>(from.size());
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  std::copy(from.begin(), from.end(), to.begin());
  isotonic(to, points, levels);
  return result;
}

// Of margins of several classes, the probabilities.
Array<double> softmax(const Array<double>& margins, bool one_versus_rest) {
  SHOAL_CHECK(margins.ndim() == 2, "margins must have two dimensions, examples and classes");
  const auto from = in(margins);
  const auto classes = static_cast<std::size_t>(margins.shape(1));
  Array<double> result = fresh<double>(static_cast<std::size_t>(margins.shape(0)), classes);
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  std::copy(from.begin(), from.end(), to.begin());
  class_probabilities(to, classes, one_versus_rest ? ClassLoss::kOneVersusRest : ClassLoss::kMultinomial);
  return result;
}

py::tuple interact(const Array<std::int64_t>& indptr, const Array<std::uint64_t>& keys, const Floats& values,
                   const Array<std::uint64_t>& fields, const Array<std::uint64_t>& pairs) {
  const FieldedRows rows{in(indptr), in(keys), in_or_empty(values), in(fields)};
  Interactions interactions(in(pairs));
  Array<std::int64_t> ends = fresh<std::int64_t>(rows.indptr.size());
  const auto to_ends = out(ends);
  {
    const py::gil_scoped_release nogil;
    interactions.count(rows, to_ends);
  }
  const auto nnz = static_cast<std::size_t>(to_ends.back());
  Array<std::uint64_t> made = fresh<std::uint64_t>(nnz);
  Floats products = values ? std::optional(fresh<float>(nnz)) : std::nullopt;
  const auto to_keys = out(made);
  const auto to_values = products ? out(*products) : std::span<float>{};
  {
    const py::gil_scoped_release nogil;
    interactions.write(rows, to_keys, to_values);
  }
  return py::make_tuple(ends, made, products);
}

// The positions of the two features of each new one.
py::tuple interaction_parents(const Array<std::int64_t>& indptr, const Array<std::uint64_t>& keys,
                              const Array<std::uint64_t>& fields, const Array<std::uint64_t>& pairs) {
  const FieldedRows rows{in(indptr), in(keys), {}, in(fields)};
  Interactions interactions(in(pairs));
  std::vector<std::int64_t> ends(rows.indptr.size());
  interactions.count(rows, ends);
  const std::size_t made = static_cast<std::size_t>(ends.back()) - rows.keys.size();
  Array<std::uint64_t> first = fresh<std::uint64_t>(made);
  Array<std::uint64_t> second = fresh<std::uint64_t>(made);
  const auto to_first = out(first);
  const auto to_second = out(second);
  {
    const py::gil_scoped_release nogil;
    interactions.write_parents(rows, to_first, to_second);
  }
  return py::make_tuple(first, second);
}

// The number of rows of a two-dimensional array; `name` is what the array holds.
std::size_t dim_of_rows(const Array<float>& rows, const char* name) {
  SHOAL_CHECK(rows.ndim() == 2, std::string(name) + " must have two dimensions, rows and dim, got " +
                                    std::to_string(rows.ndim()));
  return static_cast<std::size_t>(rows.shape(1));
}

py::tuple fm_margins(const Array<std::int64_t>& indptr, const Floats& values, const KeyBatch& batch,
                     bool bias, const Array<float>& weights, const Array<float>& factors,
                     PoolWithScratch& pool) {
  const Examples examples = examples_of(indptr, values, batch, bias);
  const std::size_t dim = dim_of_rows(factors, "factors");
  Array<double> margins = fresh<double>(examples.size());
  Array<double> sums = fresh<double>(examples.size(), dim);
  const auto to = out(margins);
  const auto to_sums = out(sums);
  const auto linear = in(weights);
  const auto rows = in(factors);
  {
    const py::gil_scoped_release nogil;
    shoal::fm_margins(examples, linear, rows, dim, to, to_sums, pool.threads);
  }
  return py::make_tuple(margins, sums);
}

Array<float> fm_gradient(const Array<std::int64_t>& indptr, const Floats& values, const KeyBatch& batch,
                         bool bias, const Array<float>& factors, const Array<double>& sums,
                         const Array<double>& slopes, PoolWithScratch& pool) {
  const Examples examples = examples_of(indptr, values, batch, bias);
  const std::size_t dim = dim_of_rows(factors, "factors");
  Array<float> result = fresh<float>(batch.size(), dim);
  const auto to = out(result);
  const auto rows = in(factors);
  const auto from_sums = in(sums);
  const auto from = in(slopes);
  const py::gil_scoped_release nogil;
  pool.with_scratch([&](KeyBatchScratch& /*unused*/, GradientScratch& scratch) {
    shoal::fm_gradient(examples, rows, dim, from_sums, from, {batch.order(), batch.group_offsets()}, to,
                       pool.threads, scratch);
    return 0;
  });
  return result;
}

using Winners = std::optional<Array<std::uint32_t>>;

Pooling pooling_of(const std::string& name) {
  constexpr std::pair<const char*, Pooling> kNames[] = {
      {"sum", Pooling::kSum}, {"mean", Pooling::kMean}, {"sqrtn", Pooling::kSqrtn}, {"max", Pooling::kMax}};
  const auto* const found =
      std::ranges::find(kNames, name, [](const auto& pair) { return std::string(pair.first); });
  SHOAL_CHECK(found != std::end(kNames), "no pooling " + name + ": sum, mean, sqrtn or max");
  return found->second;
}

// The winners, for a max only.
Winners pool_rows(const std::string& pooling, const Array<std::int64_t>& indptr, const Floats& values,
                  const KeyBatch& batch, const Array<float>& rows, Array<float>& pooled,
                  PoolWithScratch& pool) {
  const Pooling how = pooling_of(pooling);
  const Examples bags = examples_of(indptr, values, batch, false);
  const std::size_t dim = dim_of_rows(rows, "rows");
  Winners winners = how == Pooling::kMax ? Winners(fresh<std::uint32_t>(bags.size(), dim)) : std::nullopt;
  const auto to_winners = winners ? out(*winners) : std::span<std::uint32_t>{};
  const auto from = in(rows);
  const auto to = out(pooled);
  {
    const py::gil_scoped_release nogil;
    shoal::pool_rows(how, bags, from, dim, to, to_winners, pool.threads);
  }
  return winners;
}

void pool_gradient(const std::string& pooling, const Array<std::int64_t>& indptr, const Floats& values,
                   const KeyBatch& batch, const Array<float>& grads, const Winners& winners,
                   Array<float>& sums, PoolWithScratch& pool) {
  const Pooling how = pooling_of(pooling);
  const Examples bags = examples_of(indptr, values, batch, false);
  const std::size_t dim = dim_of_rows(grads, "grads");
  const auto to = out(sums);
  const auto from = in(grads);
  const auto won = winners ? in(*winners) : std::span<const std::uint32_t>{};
  const py::gil_scoped_release nogil;
  pool.with_scratch([&](KeyBatchScratch& /*unused*/, GradientScratch& scratch) {
    shoal::pool_gradient(how, bags, from, won, dim, {batch.order(), batch.group_offsets()}, to, pool.threads,
                         scratch);
    return 0;
  });
}

Array<float> pool_values_gradient(const std::string& pooling, const Array<std::int64_t>& indptr,
                                  const Floats& values, const KeyBatch& batch, const Array<float>& rows,
                                  const Array<float>& grads, const Winners& winners, PoolWithScratch& pool) {
  const Pooling how = pooling_of(pooling);
  const Examples bags = examples_of(indptr, values, batch, false);
  const std::size_t dim = dim_of_rows(rows, "rows");
  Array<float> result = fresh<float>(batch.input_size());
  const auto to = out(result);
  const auto from = in(rows);
  const auto slopes = in(grads);
  const auto won = winners ? in(*winners) : std::span<const std::uint32_t>{};
  const py::gil_scoped_release nogil;
  shoal::pool_values_gradient(how, bags, from, slopes, won, dim, to, pool.threads);
  return result;
}

void count_min_add(const Array<std::uint64_t>& keys, const std::optional<Array<std::int64_t>>& counts,
                   std::uint64_t seed, std::size_t depth, std::size_t width, Array<std::int64_t>& counters,
                   PoolWithScratch& pool) {
  SHOAL_CHECK(!counts || counts->size() == keys.size(), "counts must have one number for each key");
  const auto from = in(keys);
  const auto amounts = counts ? in(*counts) : std::span<const std::int64_t>{};
  const auto to = out(counters);
  const py::gil_scoped_release nogil;
  shoal::count_min_add({seed, depth, width}, from, amounts, to, pool.threads);
}

Array<std::int64_t> count_min_positions(const Array<std::uint64_t>& keys, std::uint64_t seed,
                                        std::size_t depth, std::size_t width, PoolWithScratch& pool) {
  Array<std::int64_t> result = fresh<std::int64_t>(depth, static_cast<std::size_t>(keys.size()));
  const auto from = in(keys);
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  shoal::count_min_positions({seed, depth, width}, from, to, pool.threads);
  return result;
}

// (loss, probability, weight, weight of label 1, first bin, last bin); None: nothing was counted.
template <class Count>
std::optional<py::tuple> count_margins(const Array<double>& margins, const Array<float>& labels,
                                       const Floats& weights, double limit, Array<Count>& counts,
                                       PoolWithScratch& pool) {
  const auto from = in(margins);
  const auto truth = in(labels);
  const auto scale = in_or_empty(weights);
  const auto to = out(counts);
  std::optional<BinaryMetrics> found;
  {
    const py::gil_scoped_release nogil;
    found = shoal::count_margins(from, truth, scale, limit, to, pool.threads);
  }
  if (!found) {
    return std::nullopt;
  }
  return py::make_tuple(found->loss, found->probability, found->weight, found->positive, found->first,
                        found->last);
}

// (first bin, last bin, examples of label 1); None: nothing was counted.
std::optional<py::tuple> count_labelled(const Array<double>& margins, const Array<float>& labels,
                                        double limit, Array<std::int64_t>& counts, PoolWithScratch& pool) {
  const auto from = in(margins);
  const auto truth = in(labels);
  const auto to = out(counts);
  std::optional<LabelledBins> found;
  {
    const py::gil_scoped_release nogil;
    found = shoal::count_labelled(from, truth, limit, to, pool.threads);
  }
  if (!found) {
    return std::nullopt;
  }
  return py::make_tuple(found->bins.first, found->bins.last, found->positive);
}

// (all pairs, those won, those tied)
py::tuple ordered_pairs(const Array<std::int64_t>& positive, const Array<std::int64_t>& negative) {
  const OrderedPairs pairs = shoal::ordered_pairs(in(positive), in(negative));
  return py::make_tuple(pairs.count, pairs.won, pairs.tied);
}

// (indptr, keys, values) of some rows of a matrix.
py::tuple gather_rows(const Array<std::int64_t>& indptr, const Array<std::uint64_t>& keys,
                      const Array<float>& values, const Array<std::int64_t>& rows) {
  const KeyedRows matrix{in(indptr), in(keys), in(values)};
  const auto wanted = in(rows);
  Array<std::int64_t> ends = fresh<std::int64_t>(wanted.size() + 1);
  write_ends(matrix, wanted, out(ends));
  const auto count = static_cast<std::size_t>(out(ends).back());
  Array<std::uint64_t> some_keys = fresh<std::uint64_t>(count);
  Array<float> some_values = fresh<float>(count);
  const auto to_keys = out(some_keys);
  const auto to_values = out(some_values);
  {
    const py::gil_scoped_release nogil;
    shoal::gather_rows(matrix, wanted, to_keys, to_values);
  }
  return py::make_tuple(ends, some_keys, some_values);
}

// (first bin, last bin) of the examples.
template <class Count>
py::tuple count_bins(const Array<double>& margins, const Array<double>& labels, const Doubles& weights,
                     double limit, Array<Count>& counts) {
  const auto found = shoal::count_bins(in(margins), in(labels), in_or_empty(weights), limit, out(counts));
  return py::make_tuple(found.first, found.last);
}

using ByFeature = ExamplesByFeature;

std::unique_ptr<ByFeature> by_feature(const Array<std::int64_t>& indptr, const Floats& values,
                                      const UniqueKeys& keys, bool bias, const Array<float>& labels,
                                      const Floats& weights, PoolWithScratch& pool) {
  const Examples examples = examples_of(indptr, values, keys.inverse(), keys.size(), bias);
  const auto truth = in(labels);
  const auto scale = in_or_empty(weights);
  const py::gil_scoped_release nogil;
  return std::make_unique<ByFeature>(examples, keys.size(), truth, scale, pool.threads);
}

void by_feature_add(ByFeature& examples, const Array<std::uint32_t>& keys, const Array<double>& deltas,
                    PoolWithScratch& pool) {
  const auto which = in(keys);
  const auto from = in(deltas);
  const py::gil_scoped_release nogil;
  examples.add(which, from, pool.threads);
}

Array<double> by_feature_margins(ByFeature& examples, PoolWithScratch& pool) {
  Array<double> result = fresh<double>(examples.size());
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  examples.margins(to, pool.threads);
  return result;
}

Array<float> by_feature_gradient(ByFeature& examples, const Array<std::uint32_t>& keys,
                                 PoolWithScratch& pool) {
  const auto which = in(keys);
  Array<float> result = fresh<float>(which.size());
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  examples.gradient(which, to, pool.threads);
  return result;
}

Array<float> by_feature_bounds(ByFeature& examples, ByFeature::Keys keys,
                               const std::vector<ByFeature::Keys>& near, PoolWithScratch& pool) {
  SHOAL_CHECK(keys.first <= keys.second, "a run of keys cannot end before it begins");
  Array<float> result = fresh<float>(keys.second - keys.first);
  const auto to = out(result);
  const py::gil_scoped_release nogil;
  examples.bounds(keys, near, to, pool.threads);
  return result;
}

}  // namespace

void add_kernel(py::module_& module) {
  py::class_<ByFeature>(module, "ExamplesByFeature")
      .def(py::init(&by_feature), py::arg("indptr").noconvert(), py::arg("values").noconvert(),
           py::arg("keys"), py::arg("bias"), py::arg("labels").noconvert(), py::arg("weights").noconvert(),
           py::arg("pool"))
      .def("margins", &by_feature_margins, py::arg("pool"))
      .def("add", &by_feature_add, py::arg("keys").noconvert(), py::arg("deltas").noconvert(),
           py::arg("pool"))
      .def("gradient", &by_feature_gradient, py::arg("keys").noconvert(), py::arg("pool"))
      .def("bounds", &by_feature_bounds, py::arg("own"), py::arg("near"), py::arg("pool"));
  module.def("logistic_margins", &logistic_margins, py::arg("indptr").noconvert(),
             py::arg("values").noconvert(), py::arg("batch"), py::arg("bias"), py::arg("weights").noconvert(),
             py::arg("pool"));
  module.def("logistic_losses", &logistic_losses, py::arg("margins").noconvert(),
             py::arg("labels").noconvert(), py::arg("weights").noconvert(), py::arg("pool"));
  module.def("count_margins", &count_margins<std::int64_t>, py::arg("margins").noconvert(),
             py::arg("labels").noconvert(), py::arg("weights").noconvert(), py::arg("limit"),
             py::arg("counts").noconvert(), py::arg("pool"));
  module.def("count_margins", &count_margins<double>, py::arg("margins").noconvert(),
             py::arg("labels").noconvert(), py::arg("weights").noconvert(), py::arg("limit"),
             py::arg("counts").noconvert(), py::arg("pool"));
  module.def("count_labelled", &count_labelled, py::arg("margins").noconvert(), py::arg("labels").noconvert(),
             py::arg("limit"), py::arg("counts").noconvert(), py::arg("pool"));
  module.def("ordered_pairs", &ordered_pairs, py::arg("positive").noconvert(),
             py::arg("negative").noconvert());
  module.def("gather_rows", &gather_rows, py::arg("indptr").noconvert(), py::arg("keys").noconvert(),
             py::arg("values").noconvert(), py::arg("rows").noconvert());
  module.def("count_bins", &count_bins<std::int64_t>, py::arg("margins").noconvert(),
             py::arg("labels").noconvert(), py::arg("weights").noconvert(), py::arg("limit"),
             py::arg("counts").noconvert());
  module.def("count_bins", &count_bins<double>, py::arg("margins").noconvert(), py::arg("labels").noconvert(),
             py::arg("weights").noconvert(), py::arg("limit"), py::arg("counts").noconvert());
  module.def("logistic_gradient", &logistic_gradient, py::arg("indptr").noconvert(),
             py::arg("values").noconvert(), py::arg("batch"), py::arg("bias"), py::arg("slopes").noconvert(),
             py::arg("pool"));
  module.def("fm_margins", &fm_margins, py::arg("indptr").noconvert(), py::arg("values").noconvert(),
             py::arg("batch"), py::arg("bias"), py::arg("weights").noconvert(),
             py::arg("factors").noconvert(), py::arg("pool"));
  module.def("fm_gradient", &fm_gradient, py::arg("indptr").noconvert(), py::arg("values").noconvert(),
             py::arg("batch"), py::arg("bias"), py::arg("factors").noconvert(), py::arg("sums").noconvert(),
             py::arg("slopes").noconvert(), py::arg("pool"));
  module.def("interact", &interact, py::arg("indptr").noconvert(), py::arg("keys").noconvert(),
             py::arg("values").noconvert(), py::arg("fields").noconvert(), py::arg("pairs").noconvert());
  module.def("interaction_parents", &interaction_parents, py::arg("indptr").noconvert(),
             py::arg("keys").noconvert(), py::arg("fields").noconvert(), py::arg("pairs").noconvert());
  module.def("pool_rows", &pool_rows, py::arg("pooling"), py::arg("indptr").noconvert(),
             py::arg("values").noconvert(), py::arg("batch"), py::arg("rows").noconvert(),
             py::arg("out").noconvert(), py::arg("pool"));
  module.def("pool_gradient", &pool_gradient, py::arg("pooling"), py::arg("indptr").noconvert(),
             py::arg("values").noconvert(), py::arg("batch"), py::arg("grads").noconvert(),
             py::arg("winners").noconvert(), py::arg("out").noconvert(), py::arg("pool"));
  module.def("pool_values_gradient", &pool_values_gradient, py::arg("pooling"), py::arg("indptr").noconvert(),
             py::arg("values").noconvert(), py::arg("batch"), py::arg("rows").noconvert(),
             py::arg("grads").noconvert(), py::arg("winners").noconvert(), py::arg("pool"));
  module.def("count_min_add", &count_min_add, py::arg("keys").noconvert(), py::arg("counts").noconvert(),
             py::arg("seed"), py::arg("depth"), py::arg("width"), py::arg("counters").noconvert(),
             py::arg("pool"));
  module.def("count_min_positions", &count_min_positions, py::arg("keys").noconvert(), py::arg("seed"),
             py::arg("depth"), py::arg("width"), py::arg("pool"));
  module.def("isotonic_margins", &isotonic_margins, py::arg("margins").noconvert(), py::arg("at").noconvert(),
             py::arg("probabilities").noconvert());
  module.def("class_probabilities", &softmax, py::arg("margins").noconvert(), py::arg("one_versus_rest"));
  module.def("logistic_probabilities", &logistic_probabilities, py::arg("margins").noconvert(),
             py::arg("pool"));
}

}  // namespace shoal::bind
