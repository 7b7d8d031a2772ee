// ClickModel: predictions of an exported click model: rows of its tables, and its dense part in ONNX Runtime.
//
//   features --click_features.h--> keys, numbers --tables--> rows --tower.onnx--> margins
//
// The graph names its inputs, and says of those of rows which keys' they are (docs/export-format.md).
//
// Threads: as of Model.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/threads.h"
#include "export/export_reader.h"
#include "predict/click_features.h"
#include "predict/description.h"
#include "predict/json.h"
#include "predict/model.h"
#include "predict/onnx_runtime.h"

namespace shoal::predict {

class ClickModel final : public Model {
 public:
  // `description`: the model of an export; `tower`: its file tower.onnx. `table`: as of TableModel.
  // std::invalid_argument, std::runtime_error: they do not fit each other.
  ClickModel(const json::object& description, std::shared_ptr<const OnnxRuntime> runtime,
             std::string_view tower, const std::function<const ExportReader*(std::string_view)>& table);

  // The format whose names of fields the model has.
  const std::string& form() const noexcept { return features_.form(); }
  // Writes the log-odds of each example, not calibrated. Throws as probabilities().
  void margins(const Features& features, std::span<double> out, ThreadPool& pool) const;

  std::size_t outputs() const noexcept override { return 1; }
  bool is_multiclass() const noexcept override { return false; }
  std::uint64_t bytes(const Features& features) const override;
  void probabilities(const Features& features, std::span<double> out, ModelScratch& scratch,
                     ThreadPool& pool) const override;

 private:
  // An input of the graph.
  struct Input {
    enum class Kind : std::uint8_t {
      kRows,
      kItemRows,
      kSideRows,
      kValues,
      kDense,
      kOffsets,
      kWeights,
      kNumeric
    };

    Kind kind = Kind::kRows;
    const ExportReader* table = nullptr;  // of rows
    std::vector<std::size_t> columns;     // of rows of fixed fields: which of them
    std::string items;                    // the list or sequence
    std::string side;
    std::size_t width = 0;  // of kNumeric
  };

  Input rows_of(const json::object& source,
                const std::function<const ExportReader*(std::string_view)>& table) const;
  Input numbers_of(std::string_view name) const;

  ClickFeatures features_;
  Calibration calibration_;
  OnnxGraph graph_;
  std::vector<Input> inputs_;
};

}  // namespace shoal::predict
