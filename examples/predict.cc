// Predictions of an exported model in C++, from several threads, while newer versions are followed.
//
//     c++ -std=c++17 examples/predict.cc $(shoal-config --cflags --libs) -o predict
//     ./predict serve/ctr '{"instances": [{"site": "a.com", "price": 0.5}]}'

#include <shoal/predict.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

// A shoal_predictor with exceptions instead of statuses.
class Predictor {
 public:
  explicit Predictor(const std::string& directory) : of_(open(directory), &shoal_close) {}

  std::vector<double> predict(const std::string& json) const {
    shoal_info info;
    shoal_describe(of_.get(), &info);
    std::vector<double> probabilities(1024 * info.outputs);
    std::size_t examples = 0;
    check([&](shoal_error* error) {
      return shoal_predict_json(of_.get(), json.data(), json.size(), 1024, probabilities.data(), &examples,
                                error);
    });
    probabilities.resize(examples * info.outputs);
    return probabilities;
  }

  bool refresh() {
    int is_new = 0;
    check([&](shoal_error* error) { return shoal_refresh(of_.get(), &is_new, error); });
    return is_new != 0;
  }

 private:
  template <class Call>
  static void check(const Call& call) {
    shoal_error error;
    if (call(&error) != SHOAL_OK) {
      throw std::runtime_error(error.message);
    }
  }

  static shoal_predictor* open(const std::string& directory) {
    shoal_predictor* opened = nullptr;
    check([&](shoal_error* error) { return shoal_open(directory.c_str(), nullptr, &opened, error); });
    return opened;
  }

  std::unique_ptr<shoal_predictor, decltype(&shoal_close)> of_;
};

}  // namespace

int main(int count, char** words) try {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s EXPORT JSON\n", words[0]);
    return 2;
  }
  Predictor model(words[1]);
  std::atomic<bool> over{false};
  std::thread follower([&] {  // a newer version is used from its next request on
    while (!over) {
      try {
        model.refresh();
      } catch (const std::exception& error) {  // the current version stays
        std::fprintf(stderr, "%s\n", error.what());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  int status = 0;
  try {
    for (const double probability : model.predict(words[2])) {
      std::printf("%.9g\n", probability);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  over = true;
  follower.join();
  return status;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
