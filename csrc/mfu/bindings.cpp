// bindings.cpp: bindings of the step counter and the profiler ranges for Python.
#include "core/bindings.h"

#include <pybind11/stl.h>

#include <optional>

#include "core/nvtx.h"
#include "mfu/step_counter.h"
#include "mfu/step_types.h"

namespace py = pybind11;

namespace flatout {
namespace {

using mfu::Phase;
using mfu::PhaseSeconds;
using mfu::Reading;
using mfu::StepCounter;
using mfu::StepTimer;
using mfu::Work;

// Returns nullopt, which is None in Python, for an unknown number.
std::optional<double> known(double value) {
  return value == value ? std::optional<double>(value) : std::nullopt;
}

void finish(StepCounter& counter, StepTimer::Token token, std::int64_t samples, std::int64_t tokens,
            std::optional<double> flops, std::optional<double> hardware_flops) {
  counter.finish(token, samples, tokens, flops.value_or(mfu::kUnknown),
                 hardware_flops.value_or(mfu::kUnknown));
}

void add(StepCounter& counter, double seconds, std::optional<double> gap, double waited, std::int64_t samples,
         std::int64_t tokens, std::optional<double> flops, std::optional<double> hardware_flops,
         std::optional<PhaseSeconds> phases) {
  counter.add(
      {.work = Work{samples, tokens, flops.value_or(mfu::kUnknown), hardware_flops.value_or(mfu::kUnknown)},
       .seconds = seconds,
       .gap = gap.value_or(mfu::kUnknown),
       .waited = waited,
       .phases = phases});
}

// Timer that is written in Python, and measures no phases.
class PythonTimer final : public StepTimer {
 public:
  Token begin(std::uintptr_t) override { return call("begin").cast<Token>(); }
  void measure_phases_every(std::int64_t) override {}
  bool measures_phases(Token) override { return false; }
  void mark(Token, Phase, std::uintptr_t) override {}
  void touch(Token token, std::uintptr_t) override { call("touch", token); }
  void finish(Token token, const Work& work) override {
    call("finish", token, work.samples, work.tokens, known(work.flops), known(work.hardware_flops));
  }
  void drop(Token token) override { call("drop", token); }
  void waited(double seconds) override { call("waited", seconds); }
  void pause() override { call("pause"); }
  void poll() override { call("poll"); }
  void reset() override { call("reset"); }

 private:
  // References are counted by hand. Before Python 3.14, the end of the interpreter unwinds a daemon thread
  // through this call. Destructors would then release references without the GIL.
  template <class... Args>
  py::object call(const char* method, Args... args) const {
    PyObject* arguments = py::make_tuple(args...).release().ptr();
    PyObject* self = py::cast(this, py::return_value_policy::reference).release().ptr();
    PyObject* function = PyObject_GetAttrString(self, method);
    PyObject* result = function == nullptr ? nullptr : PyObject_CallObject(function, arguments);
    Py_XDECREF(function);
    Py_DECREF(self);
    Py_DECREF(arguments);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }
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

  py::class_<StepTimer, PythonTimer>(m, "StepTimer").def(py::init<>());

  mfu::bind_steps(m);
  py::class_<StepCounter>(m, "StepCounter")
      .def(py::init<std::size_t>(), py::arg("window"))
      .def("use_events", &StepCounter::use_events, py::arg("device"), py::arg("current_stream"))
      .def("use_timer", &StepCounter::use_timer, py::arg("timer").none(false), py::keep_alive<1, 2>())
      .def("measure_phases_every", &StepCounter::measure_phases_every, py::arg("steps"))
      .def("pause", &StepCounter::pause)
      .def_property_readonly("step", &mfu::step_of)
      .def_property_readonly("phase", &mfu::phase_of)
      .def("begin", &StepCounter::begin)
      .def("mark", &StepCounter::mark, py::arg("token"), py::arg("phase"))
      .def("touch", &StepCounter::touch, py::arg("token"))
      .def("finish", &finish, py::arg("token"), py::arg("samples"), py::arg("tokens"), py::arg("flops"),
           py::arg("hardware_flops"))
      .def("drop", &StepCounter::drop, py::arg("token"))
      .def("waited", &StepCounter::waited, py::arg("seconds"))
      .def("add", &add, py::arg("seconds"), py::arg("gap") = py::none(), py::arg("waited") = 0.0,
           py::arg("samples") = 0, py::arg("tokens") = 0, py::arg("flops") = py::none(),
           py::arg("hardware_flops") = py::none(), py::arg("phases") = py::none())
      .def("reset", &StepCounter::reset)
      .def("window", &StepCounter::window)
      .def("total", &StepCounter::total);

  for (const char* name : {"StepReading", "StepTimer", "StepCounter"}) refuse_unmade(m.attr(name));
  m.def("show_ranges", &mfu::show_ranges, py::arg("profiler"), py::arg("range"));
  m.def("range_push", &nvtx::push, py::arg("name").none(false));
  m.def("range_pop", &nvtx::pop);
  m.def("nvtx_listens", &nvtx::listens);
}

}  // namespace flatout
