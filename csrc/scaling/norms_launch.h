// norms_launch.h: the CUDA launcher of one norm per gradient. Includes no torch header.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/norms.h"

namespace flatout {

// Computes the norms of gradients of dtype T. In `tensors`, gradients of other dtypes are empty.
template <class T>
void launch_norms(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms, cudaStream_t stream);

}  // namespace flatout
