// PredictionHandler: answers prediction requests of models that the engine computes, from body to answer.
//
// A handler is made anew whenever what is served changes, and replaces the last one (HttpServer::set_fast):
// a request is answered by one version throughout. It passes on what it does not know: other paths, bodies
// and answers of Arrow, models that PyTorch computes; and small bodies that take long, since the I/O thread
// answers those.
//
//   route     the path of requests         "/predict", "/v1/models/ctr:predict", ...
//   choices   versions, and up to which share of the requests each of them answers; one without a split
//
// Threads: any; each has working memory of its own.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "http/byte_budget.h"
#include "http/message.h"
#include "predict/model.h"
#include "predict/request_bodies.h"
#include "predict/schema.h"

namespace shoal {

// One version of a model. What it reads must stay until `keep` is released.
struct ServedVersion {
  std::string name;  // of the model
  std::uint64_t number = 0;
  std::shared_ptr<const predict::InputSchema> schema;
  std::shared_ptr<const predict::Model> model;
};

struct Route {
  std::string path;
  predict::Protocol protocol = predict::Protocol::kShoal;
  struct Choice {
    double below = 1.0;  // of numbers from 0 to 1, and the earlier choices' share
    std::size_t version = 0;
  };
  std::vector<Choice> choices;
};

// What was predicted, by all handlers and by others.
class PredictionCounters {
 public:
  using Count = std::atomic<std::uint64_t>;
  using Version = std::pair<std::string, std::uint64_t>;  // the model's name, and the number

  // The answers of a version.
  std::shared_ptr<Count> answers_of(std::string_view model, std::uint64_t number);
  void add(Count& answers, std::uint64_t examples) noexcept {
    answers.fetch_add(1, std::memory_order_relaxed);
    examples_.fetch_add(examples, std::memory_order_relaxed);
  }
  // Columns of a request that the model does not know.
  void add_unknown(std::string_view model, std::uint64_t count);

  std::uint64_t examples() const noexcept { return examples_.load(std::memory_order_relaxed); }
  std::map<Version, std::uint64_t> answers() const;
  std::map<std::string, std::uint64_t, std::less<>> unknown() const;

 private:
  Count examples_{0};
  mutable Mutex mutex_;
  std::map<Version, std::shared_ptr<Count>> answers_ GUARDED_BY(mutex_);
  std::map<std::string, std::uint64_t, std::less<>> unknown_ GUARDED_BY(mutex_);
};

struct PredictionLimits {
  std::uint64_t decoded_bytes = std::uint64_t{512} << 20U;
  bool refuse_unknown = false;
};

class PredictionHandler final : public FastHandler {
 public:
  PredictionHandler(std::vector<ServedVersion> versions, const std::vector<Route>& routes,
                    PredictionLimits limits, std::shared_ptr<PredictionCounters> counters,
                    std::shared_ptr<ByteBudget> budget);

  bool answer(const HttpRequest& request, HttpAnswer& answer) override;

 private:
  // False: it is passed on.
  bool predict(const Route& route, const HttpRequest& request, HttpAnswer& answer);
  std::size_t chosen(const Route& route, const HttpRequest& request) const;
  void check_known(const ServedVersion& version, const predict::ExampleBuilder& builder) const;

  std::vector<ServedVersion> versions_;
  std::vector<std::shared_ptr<PredictionCounters::Count>> answers_;  // of each version
  std::map<std::string, Route, std::less<>> routes_;
  PredictionLimits limits_;
  std::shared_ptr<PredictionCounters> counters_;
  std::shared_ptr<ByteBudget> budget_;
};

}  // namespace shoal
