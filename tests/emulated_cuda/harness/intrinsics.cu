// intrinsics.cu: runs operations on a device.
#include "core/cuda_launch.h"
#include "intrinsics.h"

namespace harness {
namespace {

__global__ void intrinsics_kernel(Operation operation, flatout::Divisor divisor, const Operands* operands,
                                  uint32_t* results, uint32_t count) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    results[i] = result_of(operation, operands[i], divisor);
}

}  // namespace

void launch_intrinsics(Operation operation, const flatout::Divisor& divisor, const Operands* operands,
                       uint32_t* results, uint32_t count, cudaStream_t stream) {
  flatout::launch("intrinsics_kernel", intrinsics_kernel, 16, 128, stream, operation, divisor, operands,
                  results, count);
}

}  // namespace harness
