// cuda_launch.h: what all kernels share on the CUDA side of the fence: no torch headers here.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flatout {

inline constexpr int kThreads = 512;

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next launch of anybody would report it
  throw std::runtime_error(std::string("flatout: ") + what + " failed: " + cudaGetErrorString(error));
}

}  // namespace flatout
