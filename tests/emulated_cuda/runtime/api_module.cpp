// api_module.cpp: the kernels of torch's own libraries, which register themselves when a library is loaded.
//
// These kernels are device code and cannot run. torch_shim replaces their operators. The exception is the
// kernel of torch.cuda._sleep, which keeps a stream busy.
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

using emulated::call;
using emulated::Lock;
using emulated::Needs;
using emulated::Runtime;

namespace {

constexpr double kClockGhz = 1.98;

// Kernels by the address of their host function.
auto& names = *new std::map<const void*, std::string>;

struct Configuration {
  dim3 blocks, threads;
  std::size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  names[function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, std::size_t shared_bytes,
                                     CUstream_st* stream) {
  configurations.push_back({blocks, threads, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, std::size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return cudaErrorUnknown;
  const Configuration last = configurations.back();
  configurations.pop_back();
  *blocks = last.blocks;
  *threads = last.threads;
  *shared_bytes = last.shared_bytes;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, std::size_t,
                             cudaStream_t handle) {
  const auto found = names.find(function);
  const std::string name = found == names.end() ? "a kernel without a name" : found->second;
  return call(__func__, Needs::kContext, [&](Runtime& runtime, Lock&) {
    if (name.find("spin_kernel") == std::string::npos) {
      std::fprintf(stderr, "emulated CUDA: %s is not emulated\n", name.c_str());
      return cudaErrorInvalidDeviceFunction;
    }
    const std::chrono::nanoseconds time(std::llround(*static_cast<long long*>(arguments[0]) / kClockGhz));
    return runtime.enqueue(runtime.stream_of(handle),
                           {"sleep", [time] { std::this_thread::sleep_for(time); }, 0, time});
  });
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments,
                               std::size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, threads, arguments, bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
}
