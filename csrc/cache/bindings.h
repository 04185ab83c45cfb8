// bindings.h: bindings of the sample cache for Python.
#pragma once

#include <pybind11/pybind11.h>

void bind_cache(pybind11::module_& module);
