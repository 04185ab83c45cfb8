// bindings.h: bindings of the prefetcher's classes for Python.
#pragma once

#include <pybind11/pybind11.h>

void bind_prefetch(pybind11::module_& module);
