// check_launch.h: the CUDA launchers of unscale + check, and of a norm per gradient. Includes no torch
// header.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/conclusion.h"

namespace flatout {

// Launches the whole check of gradients that have no elements.
void launch_conclusion(const Conclusion& conclusion, cudaStream_t stream);
// Launches the check of one list of Ts. Its partials start at `first_partial`. With `rewrite`, the norm is of
// order 2.
template <class T>
void launch_check(const std::vector<FlatTensor>& tensors, Norm norm, bool rewrite,
                  const Conclusion& conclusion, uint32_t first_partial, cudaStream_t stream);
template <class T>
void launch_scale(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor, cudaStream_t stream);
// Launches the norms of the gradients of dtype T. Gradients of other dtypes are empty in `tensors`.
template <class T>
void launch_norms(const std::vector<FlatTensor>& tensors, Norm norm, const Norms& norms, cudaStream_t stream);

}  // namespace flatout
