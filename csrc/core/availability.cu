// availability.cu: check of the kernels on the current device.
#include "core/availability.h"
#include "core/cuda_launch.h"

namespace flatout {
namespace {

// All kernels are compiled for the same architectures, so this kernel represents all of them.
__global__ void probe_kernel() {}

}  // namespace

bool kernels_run() {
  if (!driver_is_new_enough()) return false;
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel)) == cudaSuccess;
}

}  // namespace flatout
