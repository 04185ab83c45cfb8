// cuda_glue.h: torch's side of a CUDA launch: the device and its current stream.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "core/cuda_launch.h"
#include "core/tensors.h"

namespace flatout {

using CurrentStream = AOTITorchError (*)(int32_t device_index, void** ret_stream);

// Returns torch's function for the current stream, or null under a CPU build of torch. The function is part
// of libtorch_cuda, on which this library must not depend. Python opens libraries with RTLD_LOCAL, so the
// symbols of libtorch_cuda are not visible here. dlsym looks up the function in the copy that torch has
// loaded.
inline CurrentStream current_stream_function() {
  static const CurrentStream function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(symbol);
  }();
  return function;
}

// Makes a tensor's device current for a scope, and holds the current stream of this device.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& leader) : guard_(leader.get_device_index()) {
    const CurrentStream current_stream = current_stream_function();
    STD_TORCH_CHECK(current_stream != nullptr, "this build of torch has no CUDA streams");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(current_stream(leader.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    // torch's CUDA runtime and the static runtime of this library each have a current device. This call sets
    // the second one.
    check_cuda(cudaSetDevice(leader.get_device_index()), "cudaSetDevice");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace flatout
