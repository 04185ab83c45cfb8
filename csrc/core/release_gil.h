// release_gil.h: waits without the GIL, safe in threads that outlive the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace flatout {

// Replaces py::gil_scoped_release around waits. When a daemon thread asks for the GIL while the interpreter
// ends, Python before 3.14 unwinds the thread. Unwinding through a destructor would abort the process. So the
// thread sleeps until the process ends, as in Python 3.14.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // pthread_exit unwinds here. Outer frames hold Python objects, which cannot be freed without the GIL.
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flatout
