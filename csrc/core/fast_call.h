// fast_call.h: methods that every training step calls, bound without pybind11. The work of a step evicts
// pybind11's code from the caches, so its dispatch takes many times longer there than in a tight loop
// (benchmarks/counting_overhead.py, test_host_time_within_training).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace flatout {

// Converts an argument. For doubles, None becomes NaN. Missing arguments at the end become 0. After an error,
// returns 0 and reads nothing, because no Python code may run while an error is set.
template <class T>
T from_python(PyObject* value) {
  if (value == nullptr || PyErr_Occurred() != nullptr) return T{};
  if constexpr (std::is_same_v<T, double>) {
    return value == Py_None ? std::numeric_limits<double>::quiet_NaN() : PyFloat_AsDouble(value);
  } else {
    return static_cast<T>(PyLong_AsLongLong(value));
  }
}

// Runs `work`. Sets Python's error and returns false if `work` throws.
template <class F>
bool without_throwing(F&& work) {
  try {
    std::forward<F>(work)();
    return true;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return false;
}

using PyCFunctionFast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// Returns a function as the entry of a PyMethodDef.
inline PyCFunction as_method(PyCFunctionFast function) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Binds a function to one object. The function's `self` is a capsule that holds the C++ object and keeps the
// Python object alive. `definition` must never be destroyed.
template <class Owner>
pybind11::object bind_to(PyMethodDef& definition, const pybind11::object& owner) {
  PyObject* capsule = PyCapsule_New(owner.cast<Owner*>(), nullptr, [](PyObject* dying) {
    Py_DECREF(static_cast<PyObject*>(PyCapsule_GetContext(dying)));
  });
  if (capsule == nullptr) throw pybind11::error_already_set();
  const auto self = pybind11::reinterpret_steal<pybind11::object>(capsule);
  PyCapsule_SetContext(capsule, owner.inc_ref().ptr());
  return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
}

}  // namespace flatout
