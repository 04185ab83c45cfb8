// step_types.h: `Step` and `Phase`, the context managers of a training loop. Both are types of Python's C
// API. A Python class takes ten times as long after training has emptied the caches.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout::mfu {

// Adds the types and the names of the phases to the module.
void bind_steps(pybind11::module_& m);

// Shows steps and phases from now on as ranges, `with range(name): ...`, while an NVTX tool or torch's
// profiler listens. `profiler` is the namespace of the module torch.autograd.profiler, whose flag is read
// directly. A call of torch.autograd._profiler_enabled(), which returns the same value, takes longer.
void show_ranges(pybind11::dict profiler, pybind11::object range);

// Both functions return a property of StepCounter, which is a Python function:
// step(samples, tokens, flops) -> Step, where `flops` is None, a number or a FlopCount
pybind11::object step_of(const pybind11::object& counter);
// phase(token, name) -> Phase
pybind11::object phase_of(const pybind11::object& counter);

}  // namespace flatout::mfu
