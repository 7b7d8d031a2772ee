// predict_bench EXPORT KEYS FEATURES EXAMPLES [wait]: nanoseconds of shoal_predict_keys, an example a call.
//
// The keys of an example are drawn from 0 to KEYS - 1, each as likely, so that rows are not in a cache. Each of nine
// rounds has its own examples; prints the median and the range over the rounds, and the peak of the memory.

#include "c_api/predict.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

// Memory that no other process shares.
double own_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  double kib = 0.0;
  for (std::string name; file >> name;) {
    double size = 0.0;
    if (name.starts_with("Private_") && file >> size) {
      kib += size;
    }
  }
  return kib / 1024.0;
}

}  // namespace

int main(int count, char** words) {
  if (count < 5) {
    std::fprintf(stderr, "usage: %s EXPORT KEYS FEATURES EXAMPLES [wait]\n", words[0]);
    return 2;
  }
  const std::uint64_t keys = std::strtoull(words[2], nullptr, 10);
  const std::size_t features = std::strtoull(words[3], nullptr, 10);
  const std::size_t examples = std::strtoull(words[4], nullptr, 10);
  shoal_error error;
  shoal_predictor* model = nullptr;
  if (shoal_open(words[1], nullptr, &model, &error) != SHOAL_OK) {
    std::fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  constexpr std::size_t kRounds = 9;
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> all(features * examples);
  std::vector<double> taken;
  const std::int64_t offsets[2] = {0, static_cast<std::int64_t>(features)};
  double sum = 0.0;
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::uint64_t& key : all) {
      key = random() % keys;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < examples; ++i) {
      double probability = 0.0;
      if (shoal_predict_keys(model, 1, offsets, &all[i * features], nullptr, &probability, &error) !=
          SHOAL_OK) {
        std::fprintf(stderr, "%s\n", error.message);
        return 1;
      }
      sum += probability;
    }
    const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - begin;
    taken.push_back(ns.count() / static_cast<double>(examples));
  }
  std::sort(taken.begin(), taken.end());
  std::printf("%.0f ns (%.0f to %.0f), mean probability %.6f, %.1f MiB of its own\n", taken[kRounds / 2],
              taken.front(), taken.back(), sum / static_cast<double>(kRounds * examples), own_mib());
  std::fflush(stdout);
  if (count > 5) {
    std::getchar();
  }
  shoal_close(model);
  return 0;
}
