// cuda_glue.h: torch's side of a CUDA launch: the device and its current stream.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "core/cuda_launch.h"
#include "core/tensors.h"

namespace flatout {

using CurrentStream = AOTITorchError (*)(int32_t device_index, void** ret_stream);

// torch's function that names the current stream, or null under a CPU build of torch. It lives in
// libtorch_cuda, which this library must not need, and whose names a library opened RTLD_LOCAL does not see:
// so it is looked up in the copy that torch has loaded.
inline CurrentStream current_stream_function() {
  static const CurrentStream function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(symbol);
  }();
  return function;
}

// Makes a tensor's device current for a scope and names the stream to launch on.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& leader) : guard_(leader.get_device_index()) {
    const CurrentStream current_stream = current_stream_function();
    STD_TORCH_CHECK(current_stream != nullptr, "this build of torch has no CUDA streams");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(current_stream(leader.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    // torch's runtime and our static one each keep a current device: set ours too.
    check_cuda(cudaSetDevice(leader.get_device_index()), "cudaSetDevice");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace flatout
