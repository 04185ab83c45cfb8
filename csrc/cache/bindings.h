// bindings.h: declares what the cache of samples needs to Python.
#pragma once

#include <pybind11/pybind11.h>

void bind_cache(pybind11::module_& module);
