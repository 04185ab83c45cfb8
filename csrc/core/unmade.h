// unmade.h: refuses Python objects whose __init__ never ran, as `Class.__new__(Class)` makes them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace flatout {

// pybind11 allocates the C++ side of such an object where a method asks for it, and leaves it uninitialised.
inline void refuse_unmade(const pybind11::handle& type) {
  pybind11::detail::get_type_info(reinterpret_cast<PyTypeObject*>(type.ptr()))->operator_new =
      [](std::size_t) -> void* { throw pybind11::type_error("__init__ must be called first"); };
}

}  // namespace flatout
