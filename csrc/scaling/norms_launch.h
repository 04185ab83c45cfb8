// norms_launch.h: the CUDA launcher of a norm per gradient. Includes no torch header.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/norms.h"

namespace flatout {

// Launches the norms of the gradients of dtype T. Gradients of other dtypes are empty in `tensors`.
template <class T>
void launch_norms(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms, cudaStream_t stream);

}  // namespace flatout
