// bindings.cpp: the step counter and the profiler ranges for Python; arguments are checked by the Python
// face.
#include "mfu/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "core/nvtx.h"
#include "mfu/counter.h"
#include "mfu/step_timer.h"

namespace py = pybind11;

namespace flatout {
namespace {

using mfu::Counter;
using mfu::Reading;
using mfu::StepTimer;

// None in Python where the number is not known.
std::optional<double> known(double value) {
  return value == value ? std::optional<double>(value) : std::nullopt;
}

// A counter with its timer. The timer is optional: without one, steps arrive through add().
class StepCounter {
 public:
  explicit StepCounter(std::size_t window) : counter_(window) {}

  void use_host_clock() { timer_ = mfu::make_host_timer(counter_); }
  void use_events(int device) { timer_ = mfu::make_event_timer(counter_, device); }

  StepTimer::Token begin(std::uintptr_t stream) {
    const StepTimer::Token token = timer_->begin(stream);
    nvtx::push("flatout.step");
    return token;
  }

  void end(StepTimer::Token token, std::int64_t samples, std::optional<double> flops, std::uintptr_t stream) {
    nvtx::pop();
    timer_->end(token, stream, samples, flops.value_or(mfu::kUnknown));
  }

  void drop(StepTimer::Token token) {
    nvtx::pop();
    timer_->drop(token);
  }

  void waited(double seconds) { timer_->waited(seconds); }

  void add(double seconds, std::optional<double> gap, double waited, std::int64_t samples,
           std::optional<double> flops) {
    counter_.add(seconds, gap.value_or(mfu::kUnknown), waited, samples, flops.value_or(mfu::kUnknown));
  }

  void reset() {
    if (timer_) timer_->reset();
    counter_.reset();
  }

  Reading window() {
    if (timer_) timer_->poll();
    return counter_.window();
  }

  Reading total() {
    if (timer_) timer_->poll();
    return counter_.total();
  }

 private:
  Counter counter_;
  std::unique_ptr<StepTimer> timer_;  // refers to counter_
};

}  // namespace

void bind_mfu(py::module_& m) {
  py::class_<Reading>(m, "StepReading")
      .def_readonly("steps", &Reading::steps)
      .def_readonly("samples", &Reading::samples)
      .def_readonly("seconds", &Reading::seconds)
      .def_property_readonly("step_seconds", [](const Reading& r) { return known(r.step_seconds); })
      .def_property_readonly("samples_per_second",
                             [](const Reading& r) { return known(r.samples_per_second); })
      .def_property_readonly("flops_per_second", [](const Reading& r) { return known(r.flops_per_second); })
      .def_property_readonly("stall_fraction", [](const Reading& r) { return known(r.stall_fraction); });

  // Every call is a few hundred nanoseconds and waits for nothing: the GIL stays held.
  py::class_<StepCounter>(m, "StepCounter")
      .def(py::init<std::size_t>(), py::arg("window"))
      .def("use_host_clock", &StepCounter::use_host_clock)
      .def("use_events", &StepCounter::use_events, py::arg("device"))
      .def("begin", &StepCounter::begin, py::arg("stream") = 0)
      .def("end", &StepCounter::end, py::arg("token"), py::arg("samples"), py::arg("flops"),
           py::arg("stream") = 0)
      .def("drop", &StepCounter::drop, py::arg("token"))
      .def("waited", &StepCounter::waited, py::arg("seconds"))
      .def("add", &StepCounter::add, py::arg("seconds"), py::arg("gap"), py::arg("waited"),
           py::arg("samples"), py::arg("flops"))
      .def("reset", &StepCounter::reset)
      .def("window", &StepCounter::window)
      .def("total", &StepCounter::total);

  m.def("range_push", &nvtx::push, py::arg("name"));
  m.def("range_pop", &nvtx::pop);
}

}  // namespace flatout
