// bindings.cpp: the step counter and the profiler ranges for Python; arguments are checked by the Python
// face.
#include "mfu/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "core/fast_call.h"
#include "core/nvtx.h"
#include "mfu/counter.h"
#include "mfu/step_timer.h"

namespace py = pybind11;

namespace flatout {
namespace {

using mfu::Counter;
using mfu::Phase;
using mfu::PhaseSeconds;
using mfu::Reading;
using mfu::StepTimer;
using mfu::Work;

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

  void measure_phases_every(std::int64_t steps) { timer_->measure_phases_every(steps); }
  void pause() { timer_->pause(); }

  // Called in every step.
  std::int64_t begin(std::uintptr_t stream) { return timer_->begin(stream); }
  bool measures_phases(std::int64_t token) { return timer_->measures_phases(token); }
  void mark(std::int64_t token, std::int64_t phase, std::uintptr_t stream) {
    timer_->mark(token, static_cast<Phase>(phase), stream);
  }
  void touch(std::int64_t token, std::uintptr_t stream) { timer_->touch(token, stream); }
  void finish(std::int64_t token, std::int64_t samples, std::int64_t tokens, double flops,
              double hardware_flops) {
    timer_->finish(token, Work{samples, tokens, flops, hardware_flops});
  }
  void end(std::int64_t token, std::int64_t samples, std::int64_t tokens, double flops, double hardware_flops,
           std::uintptr_t stream) {
    timer_->touch(token, stream);
    finish(token, samples, tokens, flops, hardware_flops);
  }
  void drop(std::int64_t token) { timer_->drop(token); }
  void waited(double seconds) { timer_->waited(seconds); }

  void add(double seconds, std::optional<double> gap, double waited, std::int64_t samples,
           std::int64_t tokens, std::optional<double> flops, std::optional<double> hardware_flops,
           std::optional<PhaseSeconds> phases) {
    counter_.add(
        {.work = Work{samples, tokens, flops.value_or(mfu::kUnknown), hardware_flops.value_or(mfu::kUnknown)},
         .seconds = seconds,
         .gap = gap.value_or(mfu::kUnknown),
         .waited = waited,
         .phases = phases});
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
      .def_readonly("tokens", &Reading::tokens)
      .def_readonly("seconds", &Reading::seconds)
      .def_property_readonly("step_seconds", [](const Reading& r) { return known(r.step_seconds); })
      .def_property_readonly("samples_per_second",
                             [](const Reading& r) { return known(r.samples_per_second); })
      .def_property_readonly("tokens_per_second", [](const Reading& r) { return known(r.tokens_per_second); })
      .def_property_readonly("flops_per_second", [](const Reading& r) { return known(r.flops_per_second); })
      .def_property_readonly("hardware_flops_per_second",
                             [](const Reading& r) { return known(r.hardware_flops_per_second); })
      .def_property_readonly("stall_fraction", [](const Reading& r) { return known(r.stall_fraction); })
      .def_readonly("phase_steps", &Reading::phase_steps)
      .def_readonly("phases", &Reading::phases);

  // Every call is a few hundred nanoseconds and waits for nothing: the GIL stays held.
  py::class_<StepCounter>(m, "StepCounter")
      .def(py::init<std::size_t>(), py::arg("window"))
      .def("use_host_clock", &StepCounter::use_host_clock)
      .def("use_events", &StepCounter::use_events, py::arg("device"))
      .def("measure_phases_every", &StepCounter::measure_phases_every, py::arg("steps"))
      .def("pause", &StepCounter::pause)
      .def_property_readonly("begin", &FastCall<&StepCounter::begin>::bind)
      .def_property_readonly("measures_phases", &FastCall<&StepCounter::measures_phases>::bind)
      .def_property_readonly("mark", &FastCall<&StepCounter::mark>::bind)
      .def_property_readonly("touch", &FastCall<&StepCounter::touch>::bind)
      .def_property_readonly("finish", &FastCall<&StepCounter::finish>::bind)
      .def_property_readonly("end", &FastCall<&StepCounter::end>::bind)
      .def_property_readonly("drop", &FastCall<&StepCounter::drop>::bind)
      .def_property_readonly("waited", &FastCall<&StepCounter::waited>::bind)
      .def("add", &StepCounter::add, py::arg("seconds"), py::arg("gap") = py::none(), py::arg("waited") = 0.0,
           py::arg("samples") = 0, py::arg("tokens") = 0, py::arg("flops") = py::none(),
           py::arg("hardware_flops") = py::none(), py::arg("phases") = py::none())
      .def("reset", &StepCounter::reset)
      .def("window", &StepCounter::window)
      .def("total", &StepCounter::total);

  m.def("range_push", &nvtx::push, py::arg("name"));
  m.def("range_pop", &nvtx::pop);
  m.def("nvtx_listens", &nvtx::listens);
}

}  // namespace flatout
