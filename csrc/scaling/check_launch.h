// check_launch.h: the CUDA launchers of unscale + check, callable from code that knows torch and code that
// does not.
#pragma once

#include <vector>

#include "core/chunks.h"
#include "core/cuda_launch.h"
#include "scaling/norm.h"

namespace flatout {

// Where the verdict goes, on the device; null where it is not wanted. The last two are double for double
// gradients.
struct VerdictAddress {
  float* found_inf;
  void* grad_norm;
  void* grad_factor;
};

// `partials` has room for one entry per chunk of all tensors.
void launch_check(const std::vector<FlatTensor>& tensors, Element element, bool rewrite,
                  const DeviceScalar& inv_scale, double max_norm, Partial* partials,
                  const VerdictAddress& verdict, cudaStream_t stream);
void launch_scale(const std::vector<FlatTensor>& tensors, Element element, const DeviceScalar& factor,
                  cudaStream_t stream);
// True when the current device can run the kernels: a driver new enough, code for its architecture.
bool kernels_run();

}  // namespace flatout
