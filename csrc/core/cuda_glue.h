// cuda_glue.h: torch's side of a CUDA launch: the device, its current stream, the element type.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "core/cuda_launch.h"
#include "core/tensors.h"

// Lives in libtorch_cuda, which a CPU build of torch has not: weak, so that one binary loads under both.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flatout {

// Makes a tensor's device current for a scope and names the stream to launch on.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& leader) : guard_(leader.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this build of torch has no CUDA streams");
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(leader.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    // torch's runtime and our static one each keep a current device: set ours too.
    check_cuda(cudaSetDevice(leader.get_device_index()), "cudaSetDevice");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

inline Element element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Element::kFloat;
    case ScalarType::Double:
      return Element::kDouble;
    case ScalarType::Half:
      return Element::kHalf;
    default:
      return Element::kBfloat;
  }
}

}  // namespace flatout
