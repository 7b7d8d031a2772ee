// WithoutGil: releases the GIL while it lives, also in threads that outlive the interpreter.
//
// A daemon thread that asks for the GIL after the interpreter has begun to end is ended by pthread_exit()
// before Python 3.14. The unwinding that this causes would end the process at the first function that throws
// nothing, as the destructor of py::gil_scoped_release. Such a thread sleeps here until the process has
// ended, as Python 3.14 has it do.

#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace shoal::bind {

class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // pthread_exit()
      for (;;) {
        pause();
      }
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const thread_;
};

}  // namespace shoal::bind
