// signature.cpp: signatures of batches and of optimizers, which show a change at little cost. This module
// does not use torch, so it reads tensors through their Python attributes, or through DLPack.
#include <cstdint>
#include <vector>

#include "core/bindings.h"
#include "core/dlpack.h"
#include "core/fast_call.h"

namespace py = pybind11;

namespace flatout {
namespace {

struct Names {
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
};

class Signature {
 public:
  Signature(PyObject* tensor, PyObject* tensors_of) : tensor_(tensor), tensors_of_(tensors_of) {
    words_.reserve(32);
  }

  // After a failure, sets Python's error and returns false.
  bool add(PyObject* value) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == tensor_) return add_tensor(value);
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) return add_all(value);
    if (PyDict_CheckExact(value)) return add_values(value);
    if (value == Py_None || PyUnicode_CheckExact(value) || PyLong_Check(value) || PyFloat_Check(value)) {
      return true;
    }
    const auto tensors = steal(PyObject_CallOneArg(tensors_of_, value));
    if (!tensors) return false;
    if (!PyList_Check(tensors.ptr())) {
      PyErr_Format(PyExc_TypeError, "tensors_of must return a list, got %R", tensors.ptr());
      return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
      const auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors.ptr(), i));
      if (!add_tensor(tensor.ptr())) return false;
    }
    return true;
  }

  PyObject* bytes() const {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words_.data()),
                                     static_cast<Py_ssize_t>(words_.size() * sizeof(std::int64_t)));
  }

 private:
  static py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

  // Adds all parts of a tuple or a list. Python code may run meanwhile and change a list, so each pass reads
  // the size again.
  bool add_all(PyObject* parts) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(parts); ++i) {
      if (!add_nested(PySequence_Fast_GET_ITEM(parts, i))) return false;
    }
    return true;
  }

  bool add_values(PyObject* mapping) {
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(mapping, &position, nullptr, &value) != 0) {
      if (!add_nested(value)) return false;
    }
    return true;
  }

  bool add_nested(PyObject* value) {
    if (Py_EnterRecursiveCall(" in a batch") != 0) return false;
    // The container may release the value meanwhile. The reference is counted by hand. Before Python 3.14,
    // the end of the interpreter unwinds a daemon thread through here, without the GIL.
    Py_INCREF(value);
    const bool added = add(value);
    Py_DECREF(value);
    Py_LeaveRecursiveCall();
    return added;
  }

  bool add_tensor(PyObject* tensor) {
    static const Names names;
    const auto shape = steal(PyObject_GetAttr(tensor, names.shape));
    if (!shape) return false;
    if (!PyTuple_Check(shape.ptr())) {
      PyErr_Format(PyExc_TypeError, "the shape of a tensor must be a tuple, got %R", shape.ptr());
      return false;
    }
    const Py_ssize_t dimensions = PyTuple_GET_SIZE(shape.ptr());
    words_.push_back(dimensions);
    for (Py_ssize_t i = 0; i < dimensions; ++i) {
      PyObject* size = PyTuple_GET_ITEM(shape.ptr(), i);
      // A ragged dimension is not an int. Its hash is equal for tensors with the same ragged structure.
      // Hashes are small numbers >= 0, so a complement is negative and differs from all sizes.
      words_.push_back(PyLong_Check(size) ? PyLong_AsLongLong(size) : ~PyObject_Hash(size));
      if (PyErr_Occurred() != nullptr) return false;
    }
    const auto dtype = steal(PyObject_GetAttr(tensor, names.dtype));
    if (!dtype) return false;
    words_.push_back(reinterpret_cast<std::intptr_t>(dtype.ptr()));  // dtypes are never freed
    const auto requires_grad = steal(PyObject_GetAttr(tensor, names.requires_grad));
    if (!requires_grad) return false;
    words_.push_back(requires_grad.ptr() == Py_True);
    return true;
  }

  PyObject* tensor_;
  PyObject* tensors_of_;
  std::vector<std::int64_t> words_;
};

PyObject* signature(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "signature takes value, Tensor, tensors_of");
    return nullptr;
  }
  PyObject* result = nullptr;
  without_throwing([&] {
    Signature signature(args[1], args[2]);
    if (signature.add(args[0])) result = signature.bytes();
  });
  return result;
}

// Returns the identities of `params` and of all values in `state`, with the memory, dtypes, shapes and
// strides of `tensors`, as bytes.
py::bytes optimizer_signature(const py::list& params, const py::list& tensors, const py::dict& state,
                              const py::type& tensor_type) {
  const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  while (api->version[0] != 1 && api->older != nullptr) api = api->older;
  std::vector<std::int64_t> words;
  words.reserve(params.size() + 10 * tensors.size());
  const auto add = [&words](const void* address) {
    words.push_back(reinterpret_cast<std::intptr_t>(address));
  };
  for (const py::handle param : params) add(param.ptr());
  for (const py::handle tensor : tensors) {
    if (PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) == 0)
      throw py::type_error("tensors must hold tensors");
    dlpack::Tensor view{};
    if (api->view(tensor.ptr(), &view) != 0) {  // DLPack cannot describe it, e.g. a conjugate
      PyErr_Clear();
      add(nullptr);
      continue;
    }
    add(view.data);
    words.push_back(std::int64_t{view.ndim} << 32 | view.dtype.code << 8 | view.dtype.bits);
    words.insert(words.end(), view.shape, view.shape + view.ndim);
    words.insert(words.end(), view.strides, view.strides + view.ndim);
  }
  for (const auto& [param, entry] : state) {
    if (!PyDict_Check(entry.ptr())) continue;
    Py_ssize_t position = 0;
    for (PyObject* value = nullptr; PyDict_Next(entry.ptr(), &position, nullptr, &value) != 0;) add(value);
  }
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(std::int64_t)};
}

}  // namespace

void bind_signatures(py::module_& m) {
  static PyMethodDef definition = {"signature", as_method(signature), METH_FASTCALL, nullptr};
  m.add_object("signature",
               py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, nullptr, nullptr)));
  m.def("optimizer_signature", &optimizer_signature, py::arg("params"), py::arg("tensors"), py::arg("state"),
        py::arg("Tensor"));
}

}  // namespace flatout
