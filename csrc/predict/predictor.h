// Predictor: the newest usable version of an export, or of a directory of exports, and the swap to a newer one.
//
// Versions are compared by number and digest. A version that is damaged is passed over while there is another
// one; a check that finds nothing newer but damaged ones reports the error, and the current version stays.
//
// Threads: any number of readers, which hold the version that they have taken; refresh() by one at a time.

#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "predict/mapped_export.h"
#include "predict/model.h"
#include "predict/onnx_runtime.h"
#include "predict/schema.h"

namespace shoal::predict {

// One version: its tables, and its model where it has one that can be computed.
struct Version {
  std::shared_ptr<const ExportChain> chain;
  std::string kind;    // of its model; empty if it has none
  InputSchema schema;  // of its model
  std::unique_ptr<const Model> model;
  std::string refused;  // without a model: why
};

class Predictor {
 public:
  // `runtime`: the file of ONNX Runtime's library; empty: that which the system finds. Throws DamagedExport,
  // std::invalid_argument, std::system_error; std::runtime_error: the file is no such library.
  Predictor(std::filesystem::path directory, bool verify, const std::string& runtime);

  std::shared_ptr<const Version> now() const {
    const MutexLock lock(swapping_);
    return now_;
  }

  // Makes a newer version current, if there is one; whether there was. Throws as the constructor, and then
  // the current version stays.
  bool refresh();

 private:
  struct Found {
    std::uint64_t number;
    std::string digest;
    std::filesystem::path directory;
  };

  std::vector<Found> exports(std::exception_ptr& failure) const;
  std::shared_ptr<const Version> read(const Version* now) const;

  std::shared_ptr<const Version> make_version(std::shared_ptr<const ExportChain> chain) const;

  std::filesystem::path directory_;
  bool verify_;
  std::shared_ptr<const OnnxRuntime> runtime_;  // null: there is none
  Mutex refreshing_;
  mutable Mutex swapping_;
  std::shared_ptr<const Version> now_ GUARDED_BY(swapping_);
};

}  // namespace shoal::predict
