// signature.h: signatures of batches and of optimizers, which every step computes. Different signatures show
// a change.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout::mfu {

// Returns the Python function signature(value, Tensor, tensors_of) -> bytes. The bytes hold shape, dtype and
// requires_grad of every tensor in `value`, in order. The function searches tuples, lists and dicts. For any
// other object, tensors_of(object) must return a list of tensors.
pybind11::object signature_function();

// Returns the identities of `params` and of all values in `state`, with the memory, dtypes, shapes and
// strides of `tensors`, as bytes.
pybind11::bytes optimizer_signature(const pybind11::list& params, const pybind11::list& tensors,
                                    const pybind11::dict& state, const pybind11::type& tensor_type);

}  // namespace flatout::mfu
