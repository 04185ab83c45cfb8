// fast_call.h: methods that every training step calls, bound without pybind11. Its dispatch takes 0.2 us in a
// tight loop, but 3 to 4 us in the midst of a training step, which leaves none of it in the caches; this
// takes a tenth.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

namespace flatout {

// Integers and, for doubles, None as NaN; what is left out at the end is 0.
template <class T>
T from_python(PyObject* value) {
  if (value == nullptr) return T{};
  if constexpr (std::is_same_v<T, double>) {
    return value == Py_None ? std::numeric_limits<double>::quiet_NaN() : PyFloat_AsDouble(value);
  } else if constexpr (std::is_unsigned_v<T>) {
    return static_cast<T>(PyLong_AsUnsignedLongLong(value));
  } else {
    return static_cast<T>(PyLong_AsLongLong(value));
  }
}

template <auto method>
struct FastCall;

template <class Owner, class Result, class... Args, Result (Owner::*method)(Args...)>
struct FastCall<method> {
  // Bound to the capsule in which `bind` keeps the owner.
  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count > static_cast<Py_ssize_t>(sizeof...(Args))) {
      PyErr_SetString(PyExc_TypeError, "too many arguments");
      return nullptr;
    }
    return call(self, args, count, std::index_sequence_for<Args...>{});
  }

  // A property's getter: the method of one object, which it keeps alive.
  static pybind11::object bind(const pybind11::object& owner) {
    static PyMethodDef definition = {
        "method",
        reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(static_cast<PyCFunctionFast>(call))),
        METH_FASTCALL, nullptr};
    PyObject* capsule = PyCapsule_New(owner.cast<Owner*>(), nullptr, [](PyObject* dying) {
      Py_DECREF(static_cast<PyObject*>(PyCapsule_GetContext(dying)));
    });
    if (capsule == nullptr) throw pybind11::error_already_set();
    const auto self = pybind11::reinterpret_steal<pybind11::object>(capsule);
    PyCapsule_SetContext(capsule, owner.inc_ref().ptr());
    return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
  }

 private:
  using PyCFunctionFast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

  template <std::size_t... I>
  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, std::index_sequence<I...>) {
    auto* owner = static_cast<Owner*>(PyCapsule_GetPointer(self, nullptr));
    const std::tuple<Args...> values{
        from_python<Args>(static_cast<Py_ssize_t>(I) < count ? args[I] : nullptr)...};
    if (PyErr_Occurred() != nullptr) return nullptr;
    try {
      if constexpr (std::is_void_v<Result>) {
        (owner->*method)(std::get<I>(values)...);
        Py_RETURN_NONE;
      } else if constexpr (std::is_same_v<Result, bool>) {
        return PyBool_FromLong((owner->*method)(std::get<I>(values)...));
      } else {
        return PyLong_FromLongLong((owner->*method)(std::get<I>(values)...));
      }
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
};

}  // namespace flatout
