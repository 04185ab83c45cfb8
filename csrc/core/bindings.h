// bindings.h: functions that add the classes of one subject to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout {

void bind_cache(pybind11::module_& m);
void bind_mfu(pybind11::module_& m);
void bind_prefetch(pybind11::module_& m);

}  // namespace flatout
