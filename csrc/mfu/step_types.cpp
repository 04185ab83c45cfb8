// step_types.cpp: implementation of step_types.h.
#include "mfu/step_types.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/fast_call.h"
#include "core/nvtx.h"
#include "mfu/step_counter.h"

namespace py = pybind11;

namespace flatout::mfu {
namespace {

constexpr std::array<const char*, kPhases> kPhaseNames = {"loader_wait", "h2d",    "forward",
                                                          "backward",    "update", "host_idle"};
std::array<PyObject*, kPhases> phase_names{};  // interned
PyObject* all_phase_names = nullptr;           // joined, for errors
PyTypeObject* step_type = nullptr;
PyTypeObject* phase_type = nullptr;
PyObject* unheard = nullptr;  // the Phase for steps without measurement and profiler

// The arguments of show_ranges().
PyObject* profiler_state = nullptr;
PyObject* range_type = nullptr;

// Returns the callable that makes a profiler range, borrowed. Returns null without a profiler.
PyObject* make_range_if_heard() {
  static const bool tool = nvtx::listens();
  static PyObject* const flag = PyUnicode_InternFromString("_is_profiler_enabled");
  if (range_type == nullptr) return nullptr;
  return tool || PyDict_GetItem(profiler_state, flag) == Py_True ? range_type : nullptr;
}

// A phase and a step hold the counter's Python object, and a range if a profiler listens.
struct PhaseObject {
  PyObject_HEAD PyObject* owner;
  StepCounter* counter;  // null: unheard
  StepTimer::Token token;
  std::int64_t number;
  PyObject* range;
};

struct StepObject {
  PyObject_HEAD PyObject* owner;
  StepCounter* counter;
  StepTimer::Token token;  // kNext: not entered yet
  Work work;
  PyObject* make_range;  // borrowed; null: no profiler listens
  PyObject* range;
  bool measured;
};

void release(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

// True if a call succeeded. Drops its result.
bool succeeded(PyObject* result) {
  Py_XDECREF(result);
  return result != nullptr;
}

bool enter(PyObject* range) {
  return range == nullptr || succeeded(PyObject_CallMethod(range, "__enter__", nullptr));
}

bool leave(PyObject* range) {
  return range == nullptr ||
         succeeded(PyObject_CallMethod(range, "__exit__", "OOO", Py_None, Py_None, Py_None));
}

// The owner of a function from bind_to.
struct Bound {
  explicit Bound(PyObject* capsule)
      : counter(static_cast<StepCounter*>(PyCapsule_GetPointer(capsule, nullptr))),
        owner(static_cast<PyObject*>(PyCapsule_GetContext(capsule))) {}
  StepCounter* counter;
  PyObject* owner;
};

// -- Phase -------------------------------------------------------------------------------------------

// Returns the number of the phase `name`, or sets an error.
std::optional<std::int64_t> number_of(PyObject* name) {
  for (std::size_t i = 0; i < kPhases; ++i) {
    if (name == phase_names[i]) return i;
  }
  for (std::size_t i = 0; PyUnicode_Check(name) && i < kPhases; ++i) {
    if (PyUnicode_Compare(name, phase_names[i]) == 0) return i;
  }
  PyErr_Format(PyExc_ValueError, "phase must be one of %U, got %R", all_phase_names, name);
  return std::nullopt;
}

PyObject* make_phase(PyObject* owner, StepCounter* counter, StepTimer::Token token, std::int64_t number,
                     PyObject* make_range) {
  PyObject* range = nullptr;
  if (make_range != nullptr) {
    PyObject* name = phase_names[static_cast<std::size_t>(number)];
    range = PyObject_CallFunction(make_range, "N", PyUnicode_FromFormat("flatout.%U", name));
    if (range == nullptr) return nullptr;
  }
  auto* phase = PyObject_New(PhaseObject, phase_type);
  if (phase == nullptr) {
    Py_XDECREF(range);
    return nullptr;
  }
  phase->owner = Py_XNewRef(owner);
  phase->counter = counter;
  phase->token = token;
  phase->number = number;
  phase->range = range;
  return reinterpret_cast<PyObject*>(phase);
}

void phase_dealloc(PyObject* self) {
  auto* phase = reinterpret_cast<PhaseObject*>(self);
  Py_XDECREF(phase->owner);
  Py_XDECREF(phase->range);
  release(self);
}

PyObject* phase_enter(PyObject* self, PyObject*) {
  auto* phase = reinterpret_cast<PhaseObject*>(self);
  if (phase->counter != nullptr) {
    if (!without_throwing([&] { phase->counter->mark(phase->token, phase->number); })) return nullptr;
    if (!enter(phase->range)) return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* phase_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  auto* phase = reinterpret_cast<PhaseObject*>(self);
  if (phase->counter != nullptr) {
    if (!leave(phase->range)) return nullptr;
    constexpr auto kIdle = static_cast<std::int64_t>(Phase::kHostIdle);
    if (!without_throwing([&] { phase->counter->mark(phase->token, kIdle); })) return nullptr;
  }
  Py_RETURN_NONE;
}

// -- Step --------------------------------------------------------------------------------------------

void step_dealloc(PyObject* self) {
  auto* step = reinterpret_cast<StepObject*>(self);
  Py_DECREF(step->owner);
  Py_XDECREF(step->range);
  release(self);
}

// Returns true if the step has begun, otherwise sets an error.
bool is_entered(const StepObject* step) {
  if (step->token != StepTimer::kNext) return true;
  PyErr_SetString(PyExc_RuntimeError, "the step has not begun: with counter.step(...) as step");
  return false;
}

PyObject* step_enter(PyObject* self, PyObject*) {
  auto* step = reinterpret_cast<StepObject*>(self);
  step->make_range = make_range_if_heard();
  PyObject* range = nullptr;
  if (step->make_range != nullptr) {
    range = PyObject_CallFunction(step->make_range, "s", "flatout.step");
    if (range == nullptr) return nullptr;
  }
  Py_XSETREF(step->range, range);
  if (!enter(step->range)) return nullptr;
  const bool begun = without_throwing([&] {
    step->token = step->counter->begin();
    step->measured = step->counter->measures_phases(step->token);
  });
  return begun ? Py_NewRef(self) : nullptr;
}

PyObject* step_exit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* step = reinterpret_cast<StepObject*>(self);
  if (!is_entered(step)) return nullptr;
  const bool ended = without_throwing([&] {
    if (count == 0 || args[0] == Py_None) {
      step->counter->end(step->token, step->work);
    } else {
      step->counter->drop(step->token);
    }
  });
  if (!ended || !leave(step->range)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* step_phase(PyObject* self, PyObject* name) {
  auto* step = reinterpret_cast<StepObject*>(self);
  if (!is_entered(step)) return nullptr;
  const std::optional<std::int64_t> number = number_of(name);
  if (!number) return nullptr;
  if (!step->measured && step->make_range == nullptr) return Py_NewRef(unheard);
  return make_phase(step->owner, step->counter, step->token, *number, step->make_range);
}

// -- StepCounter's makers ----------------------------------------------------------------------------

// Reads an integer >= 0, or sets an error and returns false.
bool read_count(PyObject* value, const char* name, std::int64_t& count) {
  count = from_python<std::int64_t>(value);
  if (PyErr_Occurred() != nullptr) return false;
  if (count < 0) PyErr_Format(PyExc_ValueError, "%s must be >= 0, got %R", name, value);
  return count >= 0;
}

// Returns the attribute `total` of a FlopCount. Returns null without an error if there is no such attribute,
// as for a number.
PyObject* total_of(PyObject* value) {
  static PyObject* const name = PyUnicode_InternFromString("total");
  if (PyFloat_Check(value) || PyLong_Check(value)) return nullptr;
  PyObject* total = PyObject_GetAttr(value, name);
  if (total == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) PyErr_Clear();
  return total;
}

// Reads None, a number or a FlopCount.
bool read_flops(PyObject* value, Work& work) {
  if (value == Py_None) return true;
  if (const auto total = py::reinterpret_steal<py::object>(total_of(value))) {
    static PyObject* const name = PyUnicode_InternFromString("hardware");
    const auto hardware = py::reinterpret_steal<py::object>(PyObject_GetAttr(value, name));
    if (!hardware) return false;
    work.flops = from_python<double>(total.ptr());
    work.hardware_flops = from_python<double>(hardware.ptr());
    return PyErr_Occurred() == nullptr;
  }
  work.flops = from_python<double>(value);
  if (PyErr_Occurred() != nullptr) return false;
  const bool known = work.flops >= 0 && std::isfinite(work.flops);
  if (!known) PyErr_Format(PyExc_ValueError, "flops must be >= 0 and finite, or None, got %R", value);
  return known;
}

PyObject* new_step(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "step takes samples, tokens, flops");
    return nullptr;
  }
  Work work;
  if (!read_count(args[0], "samples", work.samples) || !read_count(args[1], "tokens", work.tokens) ||
      !read_flops(args[2], work)) {
    return nullptr;
  }
  auto* step = PyObject_New(StepObject, step_type);
  if (step == nullptr) return nullptr;
  const Bound bound(capsule);
  step->owner = Py_NewRef(bound.owner);
  step->counter = bound.counter;
  step->token = StepTimer::kNext;
  step->work = work;
  step->make_range = nullptr;
  step->range = nullptr;
  step->measured = false;
  return reinterpret_cast<PyObject*>(step);
}

PyObject* new_phase(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "phase takes token, name");
    return nullptr;
  }
  const auto token = from_python<std::int64_t>(args[0]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const std::optional<std::int64_t> number = number_of(args[1]);
  if (!number) return nullptr;
  const Bound bound(capsule);
  return make_phase(bound.owner, bound.counter, token, *number, make_range_if_heard());
}

// -- the types ---------------------------------------------------------------------------------------

std::array<PyMethodDef, 3> phase_methods = {{
    {"__enter__", phase_enter, METH_NOARGS, nullptr},
    {"__exit__", as_method(phase_exit), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

std::array<PyMethodDef, 4> step_methods = {{
    {"__enter__", step_enter, METH_NOARGS, nullptr},
    {"__exit__", as_method(step_exit), METH_FASTCALL, nullptr},
    {"phase", step_phase, METH_O,
     "phase($self, name, /)\n--\n\n"
     "Time a phase of the step: `with step.phase(\"forward\"): ...`.\n\n"
     "The block is also a range for profilers. Phases do not nest.\n\n"
     "Raises:\n    ValueError: `name` is not in `PHASES`."},
    {nullptr, nullptr, 0, nullptr},
}};

// Makes a type that lives until the process ends. `name` must live as long, because Python 3.10 keeps the
// pointer to `name`.
PyTypeObject* make_type(py::module_& m, const char* name, std::size_t size, PyMethodDef* methods,
                        destructor dealloc, const char* doc) {
  std::array<PyType_Slot, 4> slots = {{{Py_tp_methods, methods},
                                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                       {Py_tp_doc, const_cast<char*>(doc)},
                                       {0, nullptr}}};
  PyType_Spec spec = {name, static_cast<int>(size), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  m.add_object(std::strrchr(name, '.') + 1, type);
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

void bind_steps(py::module_& m) {
  py::tuple names(kPhases);
  for (std::size_t i = 0; i < kPhases; ++i) {
    phase_names[i] = PyUnicode_InternFromString(kPhaseNames[i]);
    names[i] = py::reinterpret_borrow<py::object>(phase_names[i]);
  }
  m.add_object("PHASES", names);
  all_phase_names = py::str(", ").attr("join")(names).release().ptr();
  phase_type = make_type(m, "flatout.native._host.Phase", sizeof(PhaseObject), phase_methods.data(),
                         phase_dealloc, "Context manager that measures the time of one phase of a step.");
  step_type = make_type(m, "flatout.native._host.Step", sizeof(StepObject), step_methods.data(), step_dealloc,
                        "The running step, as returned by `with counter.step(...) as step`.");
  unheard = make_phase(nullptr, nullptr, StepTimer::kNext, 0, nullptr);
  if (unheard == nullptr) throw py::error_already_set();
}

void show_ranges(py::dict profiler, py::object range) {
  profiler_state = profiler.release().ptr();
  range_type = range.release().ptr();
}

py::object step_of(const py::object& counter) {
  static PyMethodDef definition = {"step", as_method(new_step), METH_FASTCALL, nullptr};
  return bind_to<StepCounter>(definition, counter);
}

py::object phase_of(const py::object& counter) {
  static PyMethodDef definition = {"phase", as_method(new_phase), METH_FASTCALL, nullptr};
  return bind_to<StepCounter>(definition, counter);
}

}  // namespace flatout::mfu
