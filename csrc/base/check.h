// Two kinds of failure; neither ends a release process.
//
//   SHOAL_CHECK(condition, message)   the caller's mistake: throws std::invalid_argument, before anything is changed
//   SHOAL_DCHECK(condition)           ours: stops checked builds (SHOAL_CHECKED), costs nothing in others
//
// Bytes from a file or a socket are a third thing: their decoder checks lengths and returns what is wrong.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

// The message is only built when the condition fails.
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
