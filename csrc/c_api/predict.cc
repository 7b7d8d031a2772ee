// The C interface: shoal/predict.h over a Predictor.
//
// No exception leaves a function, and each thread has its own working memory.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "c_api/predict.h"
#include "predict/example_builder.h"
#include "predict/json_instances.h"
#include "predict/predictor.h"

namespace predict = shoal::predict;

struct shoal_predictor {
  shoal_predictor(const char* directory, const shoal_options& options)
      : of(directory, options.skip_checksums == 0,
           options.onnx_runtime == nullptr ? "" : options.onnx_runtime) {}

  predict::Predictor of;
};

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// What a thread keeps from request to request.
struct Memory {
  predict::ExampleBuilder builder;
  predict::JsonInstances json;
  predict::ModelScratch scratch;
  shoal::ThreadPool pool{1};
};

Memory& memory() {
  thread_local Memory mine;
  return mine;
}

shoal_status report(shoal_error* error, shoal_status status, std::int64_t example,
                    std::string_view what) noexcept {
  if (error != nullptr) {
    error->status = status;
    error->example = example;
    std::size_t size = std::min(what.size(), sizeof error->message - 1);
    while (size < what.size() && size > 0 && (static_cast<unsigned char>(what[size]) & 0xC0U) == 0x80U) {
      --size;  // not within a character
    }
    std::memcpy(error->message, what.data(), size);
    error->message[size] = '\0';
  }
  return status;
}

// A request that does not apply to the model.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class Work>
shoal_status guarded(shoal_error* error, const Work& work) noexcept {
  try {
    work();
    return report(error, SHOAL_OK, -1, "");
  } catch (const predict::BadExample& bad) {
    return report(error, SHOAL_INVALID, bad.example(), bad.what());
  } catch (const predict::DamagedExport& damaged) {
    return report(error, SHOAL_DAMAGED, -1, damaged.what());
  } catch (const Unsupported& other) {
    return report(error, SHOAL_UNSUPPORTED, -1, other.what());
  } catch (const std::system_error& refused) {
    return report(error, SHOAL_UNREADABLE, -1, refused.what());
  } catch (const std::bad_alloc&) {
    return report(error, SHOAL_NO_MEMORY, -1, "out of memory");
  } catch (const std::exception& bad) {  // of arguments
    return report(error, SHOAL_INVALID, -1, bad.what());
  }
}

void check(bool condition, const char* what) {
  if (!condition) {
    throw std::invalid_argument(what);
  }
}

// The current version of a predictor that has a model.
std::shared_ptr<const predict::Version> version_of(const shoal_predictor* predictor) {
  check(predictor != nullptr, "predictor is NULL: open one with shoal_open");
  std::shared_ptr<const predict::Version> now = predictor->of.now();
  if (now->model == nullptr) {
    throw Unsupported(now->refused);
  }
  return now;
}

void check_offsets(std::size_t examples, const std::int64_t* offsets) {
  check(offsets != nullptr && offsets[0] == 0, "offsets must begin with 0");
  for (std::size_t i = 0; i < examples; ++i) {
    if (offsets[i] > offsets[i + 1]) {
      throw predict::BadExample(
          static_cast<std::int64_t>(i),
          "offsets fall from " + std::to_string(offsets[i]) + " to " + std::to_string(offsets[i + 1]));
    }
  }
}

void check_probabilities(std::span<const double> found, std::size_t outputs) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!std::isfinite(found[i])) {
      throw predict::BadExample(static_cast<std::int64_t>(i / outputs),
                                "instance " + std::to_string(i / outputs) +
                                    ": the model has no probability for it, its values are too large");
    }
  }
}

std::size_t outputs_of(const predict::Version& version) noexcept {
  return version.model == nullptr ? 0 : version.model->outputs();
}

void predict_features(const predict::Version& version, const predict::Features& features,
                      double* probabilities) {
  Memory& mine = memory();
  check(probabilities != nullptr || features.examples() == 0, "probabilities is NULL");
  const std::size_t outputs = outputs_of(version);
  const std::span<double> out(probabilities, features.examples() * outputs);
  version.model->probabilities(features, out, mine.scratch, mine.pool);
  check_probabilities(out, outputs);
}

void predict_built(const predict::Version& version, std::size_t room, double* probabilities,
                   std::size_t* examples) {
  predict::ExampleBuilder& builder = memory().builder;
  if (builder.examples() > room) {
    throw std::invalid_argument("there are " + std::to_string(builder.examples()) +
                                " examples, and room for " + std::to_string(room));
  }
  check(builder.examples() > 0, "no examples: send at least one");
  predict_features(version, builder.finish(), probabilities);
  if (examples != nullptr) {
    *examples = builder.examples();
  }
}

predict::Cell cell_of(const shoal_cell& given) noexcept {
  return given.text == nullptr ? predict::Cell::of_number(given.number)
                               : predict::Cell::of_text({given.text, given.size});
}

template <std::size_t size>
void copy(std::string_view from, char (&to)[size]) noexcept {
  const std::size_t count = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), count);
  to[count] = '\0';
}

}  // namespace

shoal_status shoal_open(const char* directory, const shoal_options* options, shoal_predictor** predictor,
                        shoal_error* error) {
  return guarded(error, [&] {
    check(directory != nullptr && predictor != nullptr, "directory and predictor must not be NULL");
    *predictor = new shoal_predictor(directory, options == nullptr ? shoal_options{} : *options);
  });
}

void shoal_close(shoal_predictor* predictor) { delete predictor; }

shoal_status shoal_refresh(shoal_predictor* predictor, int* is_new, shoal_error* error) {
  return guarded(error, [&] {
    check(predictor != nullptr, "predictor is NULL: open one with shoal_open");
    if (is_new != nullptr) {
      *is_new = 0;
    }
    const bool found = predictor->of.refresh();
    if (is_new != nullptr) {
      *is_new = found ? 1 : 0;
    }
  });
}

void shoal_describe(const shoal_predictor* predictor, shoal_info* info) {
  const auto now = predictor->of.now();
  *info = {};
  info->version = now->chain->number();
  copy(now->kind, info->kind);
  copy(now->schema.format_name, info->format);
  info->outputs = outputs_of(*now);
  info->takes_lines = info->outputs != 0 && now->schema.takes_lines() ? 1 : 0;
  info->takes_columns = info->outputs != 0 && (now->schema.has_columns || now->schema.is_criteo()) ? 1 : 0;
}

shoal_status shoal_predict_keys(const shoal_predictor* predictor, size_t examples, const int64_t* offsets,
                                const uint64_t* keys, const float* values, double* probabilities,
                                shoal_error* error) {
  return guarded(error, [&] {
    const auto now = version_of(predictor);
    if (now->schema.needs_fields()) {
      throw Unsupported("a click model needs the field of each key: predict from lines, columns or JSON");
    }
    check_offsets(examples, offsets);
    const auto count = static_cast<std::size_t>(offsets[examples]);
    check(keys != nullptr || count == 0, "keys is NULL");
    predict_features(*now,
                     {.offsets = {offsets, examples + 1},
                      .keys = {keys, count},
                      .values = {values, values == nullptr ? 0 : count}},
                     probabilities);
  });
}

shoal_status shoal_predict_lines(const shoal_predictor* predictor, const char* text, size_t size, size_t room,
                                 double* probabilities, size_t* examples, shoal_error* error) {
  return guarded(error, [&] {
    const auto now = version_of(predictor);
    check(text != nullptr || size == 0, "text is NULL");
    predict::ExampleBuilder& builder = memory().builder;
    builder.reset(now->schema, kNoLimit);
    builder.text({text, size});
    predict_built(*now, room, probabilities, examples);
  });
}

shoal_status shoal_predict_columns(const shoal_predictor* predictor, size_t examples, const int64_t* offsets,
                                   const shoal_cell* cells, double* probabilities, shoal_error* error) {
  return guarded(error, [&] {
    const auto now = version_of(predictor);
    check_offsets(examples, offsets);
    check(cells != nullptr || offsets[examples] == 0, "cells is NULL");
    predict::ExampleBuilder& builder = memory().builder;
    builder.reset(now->schema, kNoLimit);
    for (std::size_t i = 0; i < examples; ++i) {
      const std::span<const shoal_cell> some(cells + offsets[i], cells + offsets[i + 1]);
      builder.begin();
      for (std::size_t k = 0; k < some.size(); ++k) {
        const auto is_same = [&](std::size_t other) {
          return other < some.size() && std::string_view(some[k].column) == some[other].column;
        };
        check(some[k].column != nullptr, "a cell has no column");
        if (!now->schema.is_listed(some[k].column)) {
          builder.column(some[k].column);
          builder.cell(cell_of(some[k]));
          continue;
        }
        builder.column(some[k].column);
        builder.begin_list();
        builder.cell(cell_of(some[k]));
        while (is_same(k + 1)) {
          builder.cell(cell_of(some[++k]));
        }
        builder.end_list();
      }
      builder.end();
    }
    predict_built(*now, examples, probabilities, nullptr);
  });
}

shoal_status shoal_predict_json(const shoal_predictor* predictor, const char* body, size_t size, size_t room,
                                double* probabilities, size_t* examples, shoal_error* error) {
  return guarded(error, [&] {
    const auto now = version_of(predictor);
    check(body != nullptr || size == 0, "body is NULL");
    Memory& mine = memory();
    mine.builder.reset(now->schema, kNoLimit);
    mine.json.read({body, size}, "", mine.builder);
    predict_built(*now, room, probabilities, examples);
  });
}

size_t shoal_table_dim(const shoal_predictor* predictor, const char* table) {
  const shoal::ExportReader* const found = predictor->of.now()->chain->table(table);
  return found == nullptr ? 0 : found->form().dim();
}

shoal_status shoal_pull(const shoal_predictor* predictor, const char* table, size_t count,
                        const uint64_t* keys, size_t dim, float* rows, shoal_error* error) {
  return guarded(error, [&] {
    check(predictor != nullptr && table != nullptr, "predictor and table must not be NULL");
    check((keys != nullptr && rows != nullptr) || count == 0, "keys and rows must not be NULL");
    const auto now = predictor->of.now();
    const shoal::ExportReader* const found = now->chain->table(table);
    if (found == nullptr) {
      throw std::invalid_argument("there is no table '" + std::string(table) + "'");
    }
    if (found->form().dim() != dim) {
      throw std::invalid_argument("table '" + std::string(table) + "' has rows of " +
                                  std::to_string(found->form().dim()) + " numbers, and room is for " +
                                  std::to_string(dim));
    }
    found->pull({keys, count}, shoal::ExportReader::KeyKind::kKey, {rows, count * dim}, memory().pool);
  });
}

uint64_t shoal_key(const char* text, size_t size, uint64_t field) {
  return predict::text_key({text, size}, field);
}

const char* shoal_version(void) { return SHOAL_VERSION; }
