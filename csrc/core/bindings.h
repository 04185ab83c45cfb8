// bindings.h: functions that add the classes of one subject to the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace flatout {

void bind_cache(pybind11::module_& m);
void bind_mfu(pybind11::module_& m);
void bind_prefetch(pybind11::module_& m);

// Makes calls of methods raise TypeError for an object whose __init__ never ran, such as that of
// `Class.__new__(Class)`. pybind11 would allocate a C++ object and leave it uninitialized.
inline void refuse_unmade(const pybind11::handle& type) {
  pybind11::detail::get_type_info(reinterpret_cast<PyTypeObject*>(type.ptr()))->operator_new =
      [](std::size_t) -> void* { throw pybind11::type_error("__init__ must be called first"); };
}

}  // namespace flatout
