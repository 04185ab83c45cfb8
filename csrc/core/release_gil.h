// release_gil.h: waiting without the GIL, in threads that the interpreter's end may overtake.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace flatout {

// py::gil_scoped_release for waits. A daemon thread that asks for the GIL while the interpreter ends is
// unwound by Python before 3.14, and a destructor that is unwound aborts the process. Here the thread stays
// until the process has ended, as in Python 3.14.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // The unwinding of pthread_exit. Frames further up hold Python objects, which need the GIL to be freed.
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flatout
