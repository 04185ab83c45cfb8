// step_types.h: `Step` and `Phase`, the context managers of a training loop. They are bare types of the
// interpreter: a Python class takes ten times as long where training has emptied the caches.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout::mfu {

// Adds the types and the names of the phases.
void bind_steps(pybind11::module_& m);

// From now on steps and phases are shown as ranges, `with range(name): ...`, while an NVTX tool or torch's
// profiler listens. `profiler` is the namespace of the module torch.autograd.profiler:
// torch.autograd._profiler_enabled() says the same, but takes 3 us in the midst of a step.
void show_ranges(pybind11::dict profiler, pybind11::object range);

// StepCounter's properties:
// step(samples, tokens, flops) -> Step; `flops` is None, a number or a FlopCount
pybind11::object step_of(const pybind11::object& counter);
// phase(token, name) -> Phase
pybind11::object phase_of(const pybind11::object& counter);

}  // namespace flatout::mfu
