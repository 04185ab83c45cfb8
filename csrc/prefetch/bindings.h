// bindings.h: declares the prefetcher's classes to Python.
#pragma once

#include <pybind11/pybind11.h>

void bind_prefetch(pybind11::module_& module);
