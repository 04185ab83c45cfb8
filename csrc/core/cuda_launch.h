// cuda_launch.h: launches of kernels, without torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda_runtime.h"

namespace flatout {

inline constexpr int kThreads = 512;

// Type of a kernel's argument of any size, marked __grid_constant__. nvcc does not copy such an argument. A
// host compiler would copy the argument for each thread, so in its code the type is a reference.
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
