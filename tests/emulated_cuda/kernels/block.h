// block.h: interface of device code and the executor of kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace emulated {

// Built-in variables of a thread.
struct Thread {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};

enum class WarpOperation { kSync, kShuffle, kUp, kDown, kXor, kBallot };

// A kernel with its arguments.
struct Job {
  const char* name;
  void (*run)(const Job*);  // runs one thread of the kernel
  void (*destroy)(Job*);
  // An address within the `__shared__` variables of the kernel's module, for the calling OS thread.
  void* (*shared_memory)();
};

}  // namespace emulated

// Exported by the emulated runtime.
extern "C" {
const emulated::Thread* emulated_thread();
void emulated_syncthreads(int line);
void emulated_warp(emulated::WarpOperation operation, unsigned mask, const void* in, void* out,
                   std::size_t size, unsigned argument, int width);
void emulated_threadfence();
void emulated_atomic_begin(const void* address);
void emulated_atomic_end(const void* address);
cudaError_t emulated_launch(emulated::Job* job, dim3 blocks, dim3 threads, cudaStream_t stream);
// Queues host work on a stream in the place of a kernel of torch. The work may access the memory of the
// stream's device, or the memory of all devices.
cudaError_t emulated_enqueue(const char* name, void (*run)(void*), void (*destroy)(void*), void* argument,
                             cudaStream_t stream, bool all_devices);
}
