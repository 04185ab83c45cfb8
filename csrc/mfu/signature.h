// signature.h: the signature of a batch, which every step computes. Batches of different kinds have different
// signatures.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout::mfu {

// Returns the Python function signature(value, Tensor, tensors_of) -> bytes. The bytes hold shape, dtype and
// requires_grad of every tensor in `value`, in order. The function searches tuples, lists and dicts. For any
// other object, tensors_of(object) must return a list of tensors.
pybind11::object signature_function();

}  // namespace flatout::mfu
