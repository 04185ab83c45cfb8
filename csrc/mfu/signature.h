// signature.h: what tells one kind of batch from another, found on every step.
#pragma once

#include <pybind11/pybind11.h>

namespace flatout::mfu {

// signature(value, Tensor, tensors_of) -> bytes: shape, dtype and requires_grad of every tensor in `value`,
// in order. Tuples, lists and dicts are gone through here; tensors_of(part) lists the tensors of any other
// part.
pybind11::object signature_function();

}  // namespace flatout::mfu
