// cuda_versions.h: versions of the NVIDIA driver and of the CUDA runtime in this library.
#pragma once

#include <algorithm>
#include <utility>

#ifdef FLATOUT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace flatout {

// Returns two versions, each as 1000 x major + 10 x minor: the newest CUDA that the driver supports, and the
// CUDA of the runtime. Without an installed driver, the first one is 0. In a build without CUDA, both are 0.
inline std::pair<int, int> cuda_versions() {
  int driver = 0, runtime = 0;
#ifdef FLATOUT_WITH_CUDA
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  static_cast<void>(cudaGetLastError());
#endif
  return {driver, runtime};
}

// Returns the oldest driver version that runs the kernels of a runtime version. Minor versions are compatible
// within a major version. Drivers older than 12.1 take at most 4 KiB of kernel arguments.
inline int needed_driver(int runtime) { return std::max(runtime / 1000 * 1000, 12010); }

}  // namespace flatout
