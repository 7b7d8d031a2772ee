// TableModel: predictions of a model that is made of tables alone.
//
// Algorithm. The weights of an example's keys are looked up as they are given, neither sorted nor deduplicated: a
// request has few examples. The kernels then take each entry as a key of its own. They add entries in the
// order of the example, so the probabilities have the same bits as those of a batch whose keys are sorted.
//
//   kind        tables
//   logistic    weights, dim 1
//   multiclass  weights, dim = classes
//   FM          weights, dim 1; factors
//   each of them, normalized: also the sums by whose mean square values are divided (dim 2)
//
// Threads: as of Model.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "export/export_reader.h"
#include "predict/description.h"
#include "predict/model.h"

namespace shoal::predict {

class TableModel final : public Model {
 public:
  // `table` returns a table by its name; null if there is none. std::invalid_argument: the tables do not fit
  // the description. They must outlive the model.
  TableModel(ModelDescription description, const std::function<const ExportReader*(std::string_view)>& table);

  std::size_t outputs() const noexcept override { return is_multiclass() ? weights_->form().dim() : 1; }
  bool is_multiclass() const noexcept override {
    return description_.kind == ModelDescription::Kind::kMulticlass;
  }
  std::uint64_t bytes(const Features& features) const override;
  void probabilities(const Features& features, std::span<double> out, ModelScratch& scratch,
                     ThreadPool& pool) const override;

 private:
  // The key of the constant feature (docs/export-format.md).
  static constexpr std::uint64_t kBiasKey = 0x1208DA918DB99F36U;

  std::span<const float> divided(const Features& features, ModelScratch& scratch, ThreadPool& pool) const;

  ModelDescription description_;
  const ExportReader* weights_ = nullptr;
  const ExportReader* factors_ = nullptr;
  const ExportReader* sums_ = nullptr;
  std::vector<float> bias_;  // its row
};

}  // namespace shoal::predict
