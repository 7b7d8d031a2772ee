// Two kinds of failure; neither ends a release process.
//
//   SHOAL_CHECK(condition, message)   an error of the caller: throws std::invalid_argument, before anything
//                                     is changed
//   SHOAL_DCHECK(condition)           an error of this library: stops checked builds (SHOAL_CHECKED), costs
//                                     nothing in others
//
// Invalid bytes from a file or a socket are neither: their decoder checks lengths and returns the error.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

// The message is built only if the condition fails.
#define SHOAL_CHECK(condition, message)                       \
  do {                                                        \
    if (!(condition)) [[unlikely]] {                          \
      throw std::invalid_argument(std::string{} + (message)); \
    }                                                         \
  } while (false)

#ifdef SHOAL_CHECKED
#define SHOAL_DCHECK(condition)                                                              \
  do {                                                                                       \
    if (!(condition)) [[unlikely]] {                                                         \
      std::fprintf(stderr, "%s:%d: invariant broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
#else
#define SHOAL_DCHECK(condition) static_cast<void>(0)
#endif
