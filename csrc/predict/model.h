// Model: predictions of an exported model, from the features of examples.
//
//   TableModel   of tables alone                     table_model.h
//   ClickModel   tables, and a network in front      click_model.h
//
// Threads: immutable; any number of callers. A ModelScratch is one caller's memory, and keeps it from call to call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/threads.h"

namespace shoal::predict {

// The features of some examples: example i has those from offsets[i] to offsets[i + 1].
struct Features {
  std::span<const std::int64_t> offsets;
  std::span<const std::uint64_t> keys;
  std::span<const float> values = {};          // one for each key; empty: each is 1
  std::span<const std::uint64_t> fields = {};  // one for each key, of a model that needs them

  std::size_t examples() const noexcept { return offsets.empty() ? 0 : offsets.size() - 1; }
};

struct ModelScratch {
  Buffer<float> weights;
  Buffer<float> more;
  Buffer<float> values;
  Buffer<float> column;
  Buffer<double> margins;
  Buffer<double> sums;
  std::vector<std::uint32_t> entries;  // 0, 1, ...
};

class Model {
 public:
  Model() = default;
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Probabilities of an example: 1, or one for each class.
  virtual std::size_t outputs() const noexcept = 0;
  virtual bool is_multiclass() const noexcept = 0;
  // Memory that a prediction takes, at most; that of a network while it computes is not known.
  virtual std::uint64_t bytes(const Features& features) const = 0;
  // Writes outputs() numbers for each example. std::invalid_argument, BadExample: the features do not match each
  // other, or the model; std::runtime_error: the network cannot be computed.
  virtual void probabilities(const Features& features, std::span<double> out, ModelScratch& scratch,
                             ThreadPool& pool) const = 0;
};

}  // namespace shoal::predict
