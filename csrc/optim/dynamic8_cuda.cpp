// dynamic8_cuda.cpp: the operators that convert whole tensors into 8 bits and back, for CUDA.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "optim/coded.h"
#include "optim/step_launch.h"

namespace flatout {
namespace {

void encode_cuda_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  const Coded coded = check_coded(values, codes, absmax);
  const CudaScope scope(values);
  const nvtx::Range range("flatout::encode");
  launch_encode(coded.values, coded.codes, coded.absmax, coded.numel, has_sign, scope.stream());
}

void decode_cuda_(const Tensor& values, const Tensor& codes, const Tensor& absmax, bool has_sign) {
  const Coded coded = check_coded(values, codes, absmax);
  const CudaScope scope(values);
  const nvtx::Range range("flatout::decode");
  launch_decode(coded.values, coded.codes, coded.absmax, coded.numel, has_sign, scope.stream());
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("encode_", TORCH_BOX(&flatout::encode_cuda_));
  m.impl("decode_", TORCH_BOX(&flatout::decode_cuda_));
}
