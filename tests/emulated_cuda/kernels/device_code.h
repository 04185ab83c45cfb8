// device_code.h: the names that nvcc defines for device code. g++ includes this file first in every .cu file.
//
// Models "C++ Language Extensions" of the CUDA C++ Programming Guide, as far as flatout's kernels use them. A
// thread of a kernel is a fiber. A block runs on one OS thread, so a `__shared__` variable is thread-local.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <tuple>
#include <utility>

#include "block.h"

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __grid_constant__
#undef __launch_bounds__
#define __shared__ static thread_local
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (emulated_thread()->thread)
#define blockIdx (emulated_thread()->block)
#define blockDim (emulated_thread()->block_dim)
#define gridDim (emulated_thread()->grid_dim)

// "Synchronization Functions" and "Memory Fence Functions"
inline void __syncthreads(int line = __builtin_LINE()) { emulated_syncthreads(line); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  emulated_warp(emulated::WarpOperation::kSync, mask, nullptr, nullptr, 0, 0, 32);
}
inline void __threadfence() { emulated_threadfence(); }

// "Warp Shuffle Functions"
namespace emulated {
template <class T>
T shuffle(WarpOperation operation, unsigned mask, T value, unsigned argument, int width) {
  T received;
  emulated_warp(operation, mask, &value, &received, sizeof(T), argument, width);
  return received;
}
}  // namespace emulated
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulated::shuffle(emulated::WarpOperation::kShuffle, mask, value, static_cast<unsigned>(lane),
                           width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulated::shuffle(emulated::WarpOperation::kUp, mask, value, distance, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulated::shuffle(emulated::WarpOperation::kDown, mask, value, distance, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return emulated::shuffle(emulated::WarpOperation::kXor, mask, value, static_cast<unsigned>(lanes), width);
}

// "Warp Vote Functions"
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulated::shuffle<unsigned>(emulated::WarpOperation::kBallot, mask, predicate != 0, 0, 32);
}

// "Integer Intrinsics"
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }

// "Atomic Functions", which are relaxed and so are no fences.
template <class T>
T atomicAdd(T* address, T value) {
  emulated_atomic_begin(address);
  const T old = __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  emulated_atomic_end(address);
  return old;
}

// "Atomics" of the PTX ISA: atom.acq_rel.gpu.
namespace emulated {
template <class T>
T add_acquire_release(T* address, T value) {
  __threadfence();
  const T old = atomicAdd(address, value);
  __threadfence();
  return old;
}
}  // namespace emulated

template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}

// "Execution Control" of the runtime API: a launch copies the kernel's arguments.
namespace emulated {

// One of the `__shared__` variables of each module with kernels.
inline thread_local char shared_memory_anchor;

template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments,
                          std::size_t, cudaStream_t stream, const char* name) {
  static_assert((sizeof(std::decay_t<Parameters>) + ... + 0) <= 32764,
                "\"Function Parameters\": 32,764 bytes at most");
  struct TypedJob : Job {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> arguments;
  };
  auto run = [](const Job* job) {
    const auto* typed = static_cast<const TypedJob*>(job);
    std::apply(typed->kernel, typed->arguments);
  };
  auto* job = [&]<std::size_t... I>(std::index_sequence<I...>) {
    return new TypedJob{{name, run, [](Job* old) { delete static_cast<TypedJob*>(old); },
                         [] { return static_cast<void*>(&shared_memory_anchor); }},
                        kernel,
                        {*static_cast<std::decay_t<Parameters>*>(arguments[I])...}};
  }(std::index_sequence_for<Parameters...>{});
  return emulated_launch(job, blocks, threads, stream);
}

}  // namespace emulated
// flatout's launch() has the name of its kernel in `name`.
#define cudaLaunchKernel(kernel, ...) emulated::launch_kernel(kernel, __VA_ARGS__, name)
