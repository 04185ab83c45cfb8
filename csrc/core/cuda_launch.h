// cuda_launch.h: what all kernels share on the CUDA side of the fence: no torch headers here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace flatout {

inline constexpr int kThreads = 512;

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // or the next launch of anybody would report it
  throw std::runtime_error(std::string("flatout: ") + what + " failed: " + cudaGetErrorString(error));
}

// A kernel's argument of any size, marked __grid_constant__: nvcc leaves it where the launch has put it. A
// host compiler would copy it for each thread, so it passes a reference.
#ifdef __CUDACC__
template <class T>
using Argument = const T;
#else
template <class T>
using Argument = const T&;
#endif

// Queues a kernel on a stream of the current device, with one dimension of blocks and threads.
template <class... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
            cudaStream_t stream, const std::type_identity_t<Parameters>&... arguments) {
  const void* addresses[] = {&arguments...};
  check_cuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), const_cast<void**>(addresses), 0, stream),
             name);
}

}  // namespace flatout
