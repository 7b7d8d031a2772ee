// predict_bench EXPORT KEYS FEATURES EXAMPLES [wait]: nanoseconds of shoal_predict_keys, an example a call.
//
// The keys of an example are drawn from 0 to KEYS - 1, each as likely, so that rows are not in a cache; with 1000
// examples the keys themselves are, as those of a request that has just been read. Each of 99 rounds has its own
// examples; prints the median over the rounds and the range without their first and last tenth, and the memory of its
// own. In turns with them the machine's limit: as many random lines of the export's own files, mapped as the library
// maps them, all asked for at once and read, which no lookup can do faster.

#include "c_api/predict.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

// The files of the export, mapped.
class Lines {
 public:
  explicit Lines(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const int file = ::open(entry.path().c_str(), O_RDONLY);
      const auto bytes = static_cast<std::size_t>(entry.file_size());
      if (bytes > bytes_) {  // the largest: the others are descriptions
        bytes_ = bytes;
        data_ = static_cast<const unsigned char*>(::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0));
      }
      ::close(file);
    }
  }

  // Reads the line of each number, all of which are under way at a time.
  std::uint64_t read(const std::uint64_t* numbers, std::size_t count) const {
    const std::size_t lines = bytes_ / 64;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
      __builtin_prefetch(data_ + numbers[i] % lines * 64);
    }
    for (std::size_t i = 0; i < count; ++i) {
      sum += data_[numbers[i] % lines * 64];
    }
    asm volatile("" : "+r"(sum)::"memory");
    return sum;
  }

 private:
  const unsigned char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

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
  constexpr std::size_t kRounds = 99;
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> all(features * examples);
  std::vector<double> taken;
  std::vector<double> limits;
  const Lines lines(words[1]);
  std::uint64_t bytes = 0;
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
    for (std::uint64_t& key : all) {
      key = random();
    }
    const auto again = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < examples; ++i) {
      bytes += lines.read(&all[i * features], features);
    }
    const std::chrono::duration<double, std::nano> raw = std::chrono::steady_clock::now() - again;
    limits.push_back(raw.count() / static_cast<double>(examples));
  }
  std::sort(taken.begin(), taken.end());
  std::sort(limits.begin(), limits.end());
  std::printf(
      "%.0f ns (%.0f to %.0f), mean probability %.6f, %.1f MiB of its own; random lines %.0f ns (%.0f to "
      "%.0f)%s\n",
      taken[kRounds / 2], taken[kRounds / 10], taken[kRounds - 1 - kRounds / 10],
      sum / static_cast<double>(kRounds * examples), own_mib(), limits[kRounds / 2], limits[kRounds / 10],
      limits[kRounds - 1 - kRounds / 10], bytes == 1 ? " " : "");
  std::fflush(stdout);
  if (count > 5) {
    std::getchar();
  }
  shoal_close(model);
  return 0;
}
