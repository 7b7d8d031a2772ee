// The compiler and its options, and the instruction sets that the engine can use on this machine: for
// reports.

#include <string>

#include "base/crc32c.h"
#include "base/intrinsics.h"
#include "bind/array.h"
#include "bind/bind.h"

namespace shoal::bind {

namespace {

std::string compiler() {
#if defined(__clang__)
  return "Clang " + std::string(__clang_version__);
#elif defined(__GNUC__)
  return "GCC " + std::string(__VERSION__);
#else
  return "another compiler";
#endif
}

// The instruction sets for which the engine has code; base/simd.h and base/intrinsics.h choose among them.
py::list cpu_features() {
  py::list found;
  [[maybe_unused]] const auto add = [&found](const char* name, bool supported) {
    if (supported) {
      found.append(name);
    }
  };
#if defined(__x86_64__)
  add("sse4.2", __builtin_cpu_supports("sse4.2") != 0);
  add("avx2", has_simd());
  add("avx512f", __builtin_cpu_supports("avx512f") != 0);
  add("avx512bw", __builtin_cpu_supports("avx512bw") != 0);
  add("avx512vl", __builtin_cpu_supports("avx512vl") != 0);
  add("avx512vbmi2", __builtin_cpu_supports("avx512vbmi2") != 0);
#elif defined(__aarch64__)
  add("neon", has_simd());
  add("crc32", crc32c_has_instruction());
#endif
  return found;
}

}  // namespace

void add_build(py::module_& module) {
  module.def("build_info", [] {
    py::dict info;
    info["compiler"] = compiler();
    info["build_type"] = SHOAL_BUILD_TYPE;
#if defined(SHOAL_CHECKED)
    info["checked"] = true;
#else
    info["checked"] = false;
#endif
    info["cpu_features"] = cpu_features();
    return info;
  });
}

}  // namespace shoal::bind
