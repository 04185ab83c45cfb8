// availability_cuda.cpp: the operator that checks the kernels on a device.
#include <torch/csrc/stable/library.h>

#include "core/availability.h"
#include "core/cuda_glue.h"

namespace flatout {
namespace {

bool cuda_kernels_run(int64_t device) {
  if (current_stream_function() == nullptr) return false;
  STD_TORCH_CHECK(device >= 0 && device <= INT8_MAX, "device must be the index of a GPU, got ", device);
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  const bool run = cudaSetDevice(static_cast<int>(device)) == cudaSuccess && kernels_run();
  static_cast<void>(cudaGetLastError());  // else the next check would report the error
  return run;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_FRAGMENT(flatout, m) { m.def("cuda_kernels_run(int device) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(flatout, CompositeExplicitAutograd, m) {
  m.impl("cuda_kernels_run", TORCH_BOX(&flatout::cuda_kernels_run));
}
