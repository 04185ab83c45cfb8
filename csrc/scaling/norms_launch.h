// norms_launch.h: the CUDA launcher of a norm per gradient, callable from code that knows torch and code that
// does not.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/norms.h"

namespace flatout {

// Norms of the Ts among some gradients; in `tensors` all others are empty.
template <class T>
void launch_norms(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms, cudaStream_t stream);

}  // namespace flatout
