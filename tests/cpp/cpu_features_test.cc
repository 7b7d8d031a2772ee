// What the run-time dispatch knows of this processor, compared with what the kernel says. Some compilers'
// runtimes know nothing (base/cpu_model.cc).

#if defined(__x86_64__) && defined(__linux__)
#include <fstream>
#include <initializer_list>
#include <set>
#include <sstream>
#include <string>

#include "base/simd.h"
#include "check.h"

namespace shoal::cpu_features_test {

namespace {

std::set<std::string> flags_of_the_kernel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags")) {
      std::istringstream words(line.substr(line.find(':') + 1));
      std::set<std::string> flags;
      for (std::string word; words >> word;) {
        flags.insert(word);
      }
      return flags;
    }
  }
  return {};
}

bool kernel_has(std::initializer_list<const char*> names) {
  static const std::set<std::string> flags = flags_of_the_kernel();
  for (const char* const name : names) {
    if (!flags.contains(name)) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(the_dispatch_knows_the_instruction_sets_that_the_kernel_lists) {
  CHECK(kernel_has({"sse2"}));
  CHECK_EQ(__builtin_cpu_supports("sse4.2") != 0, kernel_has({"sse4_2"}));
  CHECK_EQ(__builtin_cpu_supports("avx") != 0, kernel_has({"avx"}));
  CHECK_EQ(__builtin_cpu_supports("avx2") != 0, kernel_has({"avx2"}));
  CHECK_EQ(__builtin_cpu_supports("bmi") != 0, kernel_has({"bmi1"}));
  CHECK_EQ(__builtin_cpu_supports("pclmul") != 0, kernel_has({"pclmulqdq"}));
  CHECK_EQ(__builtin_cpu_supports("vpclmulqdq") != 0, kernel_has({"vpclmulqdq"}));
  CHECK_EQ(__builtin_cpu_supports("avx512f") != 0, kernel_has({"avx512f"}));
  CHECK_EQ(__builtin_cpu_supports("avx512bw") != 0, kernel_has({"avx512bw"}));
  CHECK_EQ(__builtin_cpu_supports("avx512vl") != 0, kernel_has({"avx512vl"}));
  CHECK_EQ(__builtin_cpu_supports("avx512vbmi2") != 0, kernel_has({"avx512_vbmi2"}));
}

#if defined(SHOAL_CLONES_CHOSEN)
TEST(the_loader_knows_the_levels_that_the_clones_are_compiled_for) {
  const bool v3 = kernel_has({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2", "avx", "avx2",
                              "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"});
  CHECK_EQ(__builtin_cpu_supports("x86-64-v3") != 0, v3);
  CHECK_EQ(__builtin_cpu_supports("x86-64-v4") != 0,
           v3 && kernel_has({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}));
}

namespace {

__attribute__((target("default"))) int chosen() { return 0; }
__attribute__((target("avx2"))) int chosen() { return 2; }
__attribute__((target("avx512f"))) int chosen() { return 512; }

}  // namespace

TEST(the_loader_chooses_the_widest_version_of_a_function) {
  CHECK_EQ(chosen(), kernel_has({"avx512f"}) ? 512 : (kernel_has({"avx2"}) ? 2 : 0));
}
#endif

}  // namespace shoal::cpu_features_test
#endif
