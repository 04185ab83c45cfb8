// per_step.h: what Python calls in every step: the context managers `Step` and `Phase`, and signatures, which
// show a change. All use Python's C API. A Python class takes ten times as long after training has emptied
// the caches.
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

// Returns the Python function signature(value, Tensor, tensors_of) -> bytes. The bytes hold shape, dtype and
// requires_grad of every tensor in `value`, in order. The function searches tuples, lists and dicts. For any
// other object, tensors_of(object) must return a list of tensors.
pybind11::object signature_function();

// Returns the identities of `params` and of all values in `state`, with the memory, dtypes, shapes and
// strides of `tensors`, as bytes.
pybind11::bytes optimizer_signature(const pybind11::list& params, const pybind11::list& tensors,
                                    const pybind11::dict& state, const pybind11::type& tensor_type);

}  // namespace flatout::mfu
