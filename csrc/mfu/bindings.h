// bindings.h: the counter's face towards python.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout {

void bind_mfu(pybind11::module_& m);

}  // namespace flatout
