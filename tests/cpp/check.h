// A test harness in one file.
//
//   TEST(a_pull_never_creates_a_row) {        // the name is the sentence that the test proves
//     CHECK(table.empty());
//     CHECK_EQ(table.size(), 0);              // prints both values; -1 is not 2^64 - 1
//     CHECK_NEAR(loss, 0.6931, 1e-4);         // |a - b| <= bound, so never for NaN
//     CHECK_THROWS(table.pull(k, r), "dim");  // throws a std::exception whose what() contains "dim"
//   }
//
// A failed check prints itself and leaves its test by an exception, so that nothing runs on values already
// known to be wrong. In a thread that the test started the exception is not caught: it prints itself and
// ends the program.
//
// Threads: checks may run in any thread; tests run one after another.

#pragma once

#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shoal::check {

struct Failed {};

// Whether an emulator of another processor runs the tests, as tools/check_wheels.py says. qemu-user ignores
// limits of memory, and its children have no threads.
inline bool is_emulated() {
  const bool is = std::getenv("SHOAL_EMULATED") != nullptr;
  if (is) {
    std::printf("    not tested in an emulator\n");
  }
  return is;
}

// A sanitizer runs the tests: each step takes 10 to 50 times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(SHOAL_SANITIZED)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

// So many rounds of a random test, and a third of them under a sanitizer, whose findings are not rare ones.
template <class T>
constexpr T rounds(T count) {
  return kIsSanitized ? (count + 2) / 3 : count;
}

struct Where {
  const char* file;
  int line;
};
struct Test {
  std::string name;  // "slot_table_test/a_pull_never_creates_a_row"
  void (*body)();
};
inline std::vector<Test> tests;

inline bool add(std::string_view file, std::string_view name, void (*body)()) {
  file.remove_prefix(file.rfind('/') + 1);
  tests.push_back({std::string(file.substr(0, file.rfind('.'))) + "/" + std::string(name), body});
  return true;
}

[[noreturn, gnu::noinline]] inline void fail(std::string_view what, const std::string& more, Where at) {
  std::printf("%s:%d: %.*s%s\n", at.file, at.line, static_cast<int>(what.size()), what.data(), more.c_str());
  std::fflush(stdout);
  throw Failed{};
}

// Loops call these millions of times, so that no text is made for a check that holds.
inline void expect(bool ok, std::string_view what, Where at) {
  if (!ok) fail(what, {}, at);
}

void expect_that(bool ok, const auto& a, const auto& b, std::string_view names, Where at) {
  if (ok) return;
  std::ostringstream text;
  text.precision(17);
  if constexpr (requires { text << a << b; }) text << ": " << a << " and " << b;
  fail(names, text.str(), at);
}

template <class A, class B>
void expect_equal(const A& a, const B& b, std::string_view names, Where at) {
  if constexpr (std::integral<A> && std::integral<B> && !std::same_as<A, B>) {
    expect_that(std::cmp_equal(a, b), a, b, names, at);
  } else {
    expect_that(a == b, a, b, names, at);
  }
}

void expect_throws(auto body, std::string_view part, std::string_view name, Where at) {
  try {
    body();
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    if (what.find(part) != std::string_view::npos) return;
    fail(name, " threw: " + std::string(what), at);
  }
  fail(name, " threw nothing", at);
}

// Runs the tests whose name contains `part`, all for an empty one, and returns the exit code.
inline int run(std::string_view part) {
  int passed = 0, failed = 0;
  for (const Test& test : tests) {
    if (test.name.find(part) == std::string::npos) continue;
    try {
      test.body();
      ++passed;
      continue;
    } catch (const Failed&) {  // it has printed itself
    } catch (const std::exception& error) {
      std::printf("threw \"%s\"\n", error.what());
    }
    ++failed;
    std::printf("FAILED %s\n", test.name.c_str());
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace shoal::check

#define TEST(name)                                                                            \
  static void name();                                                                         \
  [[maybe_unused]] static const bool name##_added = shoal::check::add(__FILE__, #name, name); \
  static void name()
// A test in which the thread sanitizer would see nothing: it does without.
#ifdef __SANITIZE_THREAD__
#define TEST_OF_ONE_THREAD(name) [[maybe_unused]] static void name()
#else
#define TEST_OF_ONE_THREAD(name) TEST(name)
#endif
#define CHECK_AT (shoal::check::Where{__FILE__, __LINE__})
#define CHECK(...) shoal::check::expect(static_cast<bool>(__VA_ARGS__), "not true: " #__VA_ARGS__, CHECK_AT)
#define CHECK_EQ(a, b) shoal::check::expect_equal(a, b, "not equal: " #a " and " #b, CHECK_AT)
#define CHECK_NEAR(a, b, bound) \
  shoal::check::expect_that(std::abs((a) - (b)) <= (bound), a, b, "not near: " #a " and " #b, CHECK_AT)
#define CHECK_THROWS(expression, part) \
  shoal::check::expect_throws([&] { static_cast<void>(expression); }, part, #expression, CHECK_AT)
