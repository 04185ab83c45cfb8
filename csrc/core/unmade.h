// unmade.h: refuses Python objects whose __init__ never ran, such as those of `Class.__new__(Class)`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace flatout {

// Makes a call of a method of such an object raise TypeError. pybind11 would allocate a C++ object and leave
// it uninitialized.
inline void refuse_unmade(const pybind11::handle& type) {
  pybind11::detail::get_type_info(reinterpret_cast<PyTypeObject*>(type.ptr()))->operator_new =
      [](std::size_t) -> void* { throw pybind11::type_error("__init__ must be called first"); };
}

}  // namespace flatout
