#include "predict/predictor.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "predict/click_model.h"
#include "predict/description.h"
#include "predict/table_model.h"

namespace shoal::predict {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kClickModel = "click model";
constexpr std::string_view kTower = "tower.onnx";

}  // namespace

Predictor::Predictor(fs::path directory, bool verify, const std::string& runtime)
    : directory_(std::move(directory)),
      verify_(verify),
      runtime_(OnnxRuntime::open(runtime)),
      now_(read(nullptr)) {}

std::shared_ptr<const Version> Predictor::make_version(std::shared_ptr<const ExportChain> chain) const {
  auto version = std::make_shared<Version>();
  const auto table = [&](std::string_view name) { return chain->table(name); };
  if (const auto& model = chain->newest().model; !model) {
    version->refused = "the export is of tables without a model: read rows with shoal_pull";
  } else if (version->kind = text_in(*model, "kind"); version->kind != kClickModel) {
    version->schema = read_schema(*model, "");
    version->model = std::make_unique<const TableModel>(read_description(*model), table);
  } else if (const auto tower = chain->extra(kTower); !tower) {
    version->refused = "a click model has a network: export it with onnx, or read its rows with shoal_pull";
  } else if (runtime_ == nullptr) {
    version->refused =
        "a click model needs libonnxruntime.so, and there is none: pass its path to shoal_open, or "
        "read rows with shoal_pull";
  } else {
    try {
      auto click = std::make_unique<const ClickModel>(*model, runtime_, *tower, table);
      version->schema = read_schema(*model, click->form());
      version->model = std::move(click);
    } catch (const std::runtime_error& error) {
      throw DamagedExport(std::string(kTower) + " is not the dense part of this model: " + error.what());
    }
  }
  version->chain = std::move(chain);
  return version;
}

// The exports of the directory, the highest number first. The first error of those that are damaged.
std::vector<Predictor::Found> Predictor::exports(std::exception_ptr& failure) const {
  std::vector<Found> found;
  const auto add = [&](const fs::path& where) {
    try {
      Manifest manifest = manifest_in(where);
      found.push_back({manifest.number, std::move(manifest.digest), where});
    } catch (const std::exception&) {
      failure = failure == nullptr ? std::current_exception() : failure;
    }
  };
  if (!fs::is_directory(directory_)) {
    throw DamagedExport(directory_.string() + ": there is no such export");
  }
  if (fs::exists(directory_ / kManifestName)) {
    add(directory_);
  } else {
    std::vector<fs::path> places;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      if (std::error_code ignored;
          entry.is_directory(ignored) && fs::exists(entry.path() / kManifestName, ignored)) {
        places.push_back(entry.path());
      }
    }
    std::sort(places.begin(), places.end());
    std::for_each(places.begin(), places.end(), add);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return a.number > b.number; });
  return found;
}

// Null if the current version is the newest one.
std::shared_ptr<const Version> Predictor::read(const Version* now) const {
  std::exception_ptr failure;
  const std::vector<Found> all = exports(failure);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Found& one = all[i];
    if (now != nullptr && (one.number < now->chain->number() || one.digest == now->chain->digest())) {
      break;
    }
    const auto other = std::find_if(all.begin(), all.end(), [&](const Found& b) {
      return b.number == one.number && b.digest != one.digest;
    });
    try {
      if (other != all.end()) {
        throw DamagedExport(one.directory.string() + " and " + other->directory.string() +
                            " are different exports, and each is version " + std::to_string(one.number));
      }
      return make_version(
          ExportChain::open(one.directory, verify_, now == nullptr ? nullptr : now->chain.get()));
    } catch (const std::exception&) {
      failure = failure == nullptr ? std::current_exception() : failure;
    }
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
  if (now == nullptr) {
    throw DamagedExport(directory_.string() + " is not an export, and has none in it");
  }
  return nullptr;
}

bool Predictor::refresh() {
  const MutexLock lock(refreshing_);
  const std::shared_ptr<const Version> before = now();
  std::shared_ptr<const Version> found = read(before.get());
  if (found == nullptr) {
    return false;
  }
  {
    const MutexLock swap(swapping_);
    now_.swap(found);
  }
  return true;  // the old version ends here, or with its last request
}

}  // namespace shoal::predict
