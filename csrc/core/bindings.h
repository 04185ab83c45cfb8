// bindings.h: functions that add the classes of one subject to the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace flatout {

void bind_cache(pybind11::module_& m);
void bind_mfu(pybind11::module_& m);
void bind_prefetch(pybind11::module_& m);
void bind_signatures(pybind11::module_& m);

// Makes methods raise TypeError on an object that Python made without __init__, as Class.__new__(Class) does.
// pybind11 would run the method on uninitialized memory.
inline void refuse_unmade(const pybind11::handle& type) {
  pybind11::detail::get_type_info(reinterpret_cast<PyTypeObject*>(type.ptr()))->operator_new =
      [](std::size_t) -> void* { throw pybind11::type_error("__init__ must be called first"); };
}

}  // namespace flatout
