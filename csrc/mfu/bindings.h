// bindings.h: bindings of the step counter for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout {

void bind_mfu(pybind11::module_& m);

}  // namespace flatout
