#include "serve/prediction_handler.h"

#include <boost/json/serialize.hpp>
#include <cmath>
#include <random>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "base/threads.h"
#include "http/server.h"
#include "text/token_key.h"

namespace shoal {

namespace {

constexpr std::string_view kArrow = "application/vnd.apache.arrow.stream";
constexpr std::string_view kJson = "application/json";
constexpr std::string_view kJsonBytes = "inference-header-content-length";
constexpr std::string_view kBusy = "the requests in progress use all memory that they may: try again later";
constexpr std::string_view kRouteKey = "shoal-route";
constexpr std::size_t kDecodedBytes = 10;  // for a byte of a body, at most: a feature has two bytes or more
// A small body whose prediction takes more memory has crosses of long lists.
constexpr std::uint64_t kQuickBytes = std::uint64_t{4} << 20U;

struct Memory {
  predict::RequestBodies requests;
  predict::ModelScratch scratch;
  predict::Answer answer;
  std::vector<double> probabilities;
  ThreadPool pool{1};
  std::minstd_rand random{std::random_device{}()};

  void trim() {
    constexpr std::size_t kKept = 1 << 17;
    requests.trim();
    if (scratch.entries.size() > kKept) {
      scratch = {};
    }
    if (probabilities.capacity() > kKept) {
      probabilities = {};
      answer = {};
    }
  }
};

Memory& memory() {
  thread_local Memory mine;
  return mine;
}

void refuse(HttpAnswer& answer, int status, std::string_view why) {
  answer.clear();
  answer.status = status;
  answer.content_type = kJson;
  answer.body = R"({"error":)" + boost::json::serialize(boost::json::string_view(why)) + '}';
  if (status == 503) {
    answer.add_header("retry-after", "1");
  }
}

// Bytes of a budget that a request holds.
class Held {
 public:
  Held(ByteBudget& budget, std::uint64_t bytes) : budget_(budget), bytes_(budget.add(bytes) ? bytes : 0) {
    fits_ = bytes_ == bytes;
  }
  ~Held() { budget_.give_back(bytes_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  bool fits() const noexcept { return fits_; }

 private:
  ByteBudget& budget_;
  std::uint64_t bytes_;
  bool fits_ = false;
};

}  // namespace

std::shared_ptr<PredictionCounters::Count> PredictionCounters::answers_of(std::string_view model,
                                                                          std::uint64_t number) {
  const MutexLock lock(mutex_);
  std::shared_ptr<Count>& count = answers_[{std::string(model), number}];
  if (count == nullptr) {
    count = std::make_shared<Count>(0);
  }
  return count;
}

void PredictionCounters::add_unknown(std::string_view model, std::uint64_t count) {
  const MutexLock lock(mutex_);
  const auto found = unknown_.find(model);
  if (found == unknown_.end()) {
    unknown_.emplace(model, count);
  } else {
    found->second += count;
  }
}

std::map<PredictionCounters::Version, std::uint64_t> PredictionCounters::answers() const {
  const MutexLock lock(mutex_);
  std::map<Version, std::uint64_t> found;
  for (const auto& [version, count] : answers_) {
    found.emplace(version, count->load(std::memory_order_relaxed));
  }
  return found;
}

std::map<std::string, std::uint64_t, std::less<>> PredictionCounters::unknown() const {
  const MutexLock lock(mutex_);
  return unknown_;
}

PredictionHandler::PredictionHandler(std::vector<ServedVersion> versions, const std::vector<Route>& routes,
                                     PredictionLimits limits, std::shared_ptr<PredictionCounters> counters,
                                     std::shared_ptr<ByteBudget> budget)
    : versions_(std::move(versions)),
      limits_(limits),
      counters_(std::move(counters)),
      budget_(std::move(budget)) {
  for (const ServedVersion& version : versions_) {
    answers_.push_back(counters_->answers_of(version.name, version.number));
  }
  for (const Route& route : routes) {
    SHOAL_CHECK(!route.choices.empty(), "route " + route.path + " has no version");
    for (const Route::Choice& choice : route.choices) {
      SHOAL_CHECK(choice.version < versions_.size(),
                  "route " + route.path + " has a version that is not served");
    }
    routes_.emplace(route.path, route);
  }
}

// By the split: the same for equal route keys.
std::size_t PredictionHandler::chosen(const Route& route, const HttpRequest& request) const {
  if (route.choices.size() == 1) {
    return route.choices.front().version;
  }
  const std::string_view key = request.header(kRouteKey);
  const auto* const p = reinterpret_cast<const std::uint8_t*>(key.data());
  const double draw = key.empty() ? std::uniform_real_distribution<double>()(memory().random)
                                  : std::ldexp(static_cast<double>(text::token_key(
                                                   text::field_seed(0), p, key.size(), p + key.size())),
                                               -64);
  for (const Route::Choice& choice : route.choices) {
    if (draw < choice.below) {
      return choice.version;
    }
  }
  return route.choices.back().version;  // of rounding: the shares sum to 1
}

void PredictionHandler::check_known(const ServedVersion& version,
                                    const predict::ExampleBuilder& builder) const {
  const auto& unknown = builder.unknown();
  if (unknown.empty()) {
    return;
  }
  counters_->add_unknown(version.name, unknown.size());
  if (!limits_.refuse_unknown) {
    return;
  }
  std::string names;
  for (const std::string& name : unknown) {
    names.append(names.empty() ? "" : ", ").append(predict::in_quotes(name));
  }
  throw predict::BadBody((unknown.size() > 1 ? "columns " + names + " are" : "column " + names + " is") +
                         " not known to the model: its columns are " + version.schema->names());
}

bool PredictionHandler::predict(const Route& route, const HttpRequest& request, HttpAnswer& answer) {
  Memory& mine = memory();
  const Held decoded(*budget_, std::min(limits_.decoded_bytes, request.body.size() * kDecodedBytes));
  if (!decoded.fits()) {
    refuse(answer, 503, kBusy);
    return true;
  }
  const std::size_t which = chosen(route, request);
  const ServedVersion& version = versions_[which];
  const bool is_multiclass = version.model->is_multiclass();
  const predict::Features features = mine.requests.read({.protocol = route.protocol,
                                                         .body = request.body,
                                                         .content_type = request.header("content-type"),
                                                         .json_bytes = request.header(kJsonBytes),
                                                         .is_multiclass = is_multiclass},
                                                        *version.schema, limits_.decoded_bytes);
  const std::uint64_t bytes = version.model->bytes(features);
  if (bytes > limits_.decoded_bytes) {
    throw predict::TooLarge("the rows of the examples take " + std::to_string(bytes) +
                            " bytes, and at most " + std::to_string(limits_.decoded_bytes) +
                            " are used: send fewer examples in a request");
  }
  if (bytes > kQuickBytes && request.body.size() <= HttpServer::kSmall) {
    return false;
  }
  check_known(version, mine.requests.builder());
  const Held rows(*budget_, bytes);
  if (!rows.fits()) {
    refuse(answer, 503, kBusy);
    return true;
  }
  const std::size_t outputs = version.model->outputs();
  mine.probabilities.resize(features.examples() * outputs);
  version.model->probabilities(features, mine.probabilities, mine.scratch, mine.pool);
  for (std::size_t i = 0; i < mine.probabilities.size(); ++i) {
    if (!std::isfinite(mine.probabilities[i])) {
      throw predict::BadBody("instance " + std::to_string(i / outputs) +
                             ": the model has no probability for it, its values are too large");
    }
  }
  mine.requests.write(version.number, version.name, mine.probabilities, outputs, is_multiclass, mine.answer);
  answer.content_type = mine.answer.content_type;
  answer.add_header("shoal-version", std::to_string(version.number));
  if (mine.answer.json_bytes > 0) {
    answer.add_header(kJsonBytes, std::to_string(mine.answer.json_bytes));
  }
  std::swap(answer.body, mine.answer.body);
  counters_->add(*answers_[which], features.examples());
  return true;
}

bool PredictionHandler::answer(const HttpRequest& request, HttpAnswer& answer) {
  const auto route = routes_.find(request.target);
  if (route == routes_.end() || request.method != "POST" ||
      (route->second.protocol == predict::Protocol::kShoal &&
       (!predict::RequestBodies::takes(request.header("content-type")) ||
        request.header("accept").find(kArrow) != std::string_view::npos))) {
    return false;
  }
  bool is_answered = true;
  try {
    is_answered = predict(route->second, request, answer);
  } catch (const predict::TooLarge& error) {
    refuse(answer, 413, error.what());
  } catch (const predict::BadExample& error) {
    refuse(answer, 400, error.what());
  } catch (const predict::BadBody& error) {
    refuse(answer, 400, error.what());
  } catch (const std::invalid_argument& error) {
    refuse(answer, 400, error.what());
  }
  memory().trim();
  return is_answered;
}

}  // namespace shoal
