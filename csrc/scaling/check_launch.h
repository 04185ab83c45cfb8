// check_launch.h: the CUDA launchers of unscale + check, callable from code that knows torch and code that
// does not.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/check_chunk.h"

namespace flatout {

// Before the launches of a check. Without anything to add up, this is the verdict already.
void begin_check(const Conclusion& conclusion, cudaStream_t stream);
// One list of a check, of Ts; its partials start at `first_partial`. With `rewrite` the norm is of order 2.
template <class T>
void launch_check(const std::vector<FlatTensor>& tensors, Norm norm, bool rewrite,
                  const Conclusion& conclusion, uint32_t first_partial, cudaStream_t stream);
template <class T>
void launch_scale(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor, cudaStream_t stream);

}  // namespace flatout
