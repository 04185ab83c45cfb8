// check_cuda.cpp: unscale + check under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "scaling/check.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

std::tuple<Tensor, Tensor, Tensor> check_on_device(const TensorList& grads,
                                                   const std::optional<Tensor>& inv_scale,
                                                   std::optional<double> max_norm, bool rewrite) {
  const GradCheck check = prepare_check(grads, inv_scale, max_norm);
  const CudaScope scope(grads[0]);
  int64_t chunks = 0;
  for (const FlatTensor& tensor : check.tensors) chunks += chunks_of(tensor.numel);
  static_assert(sizeof(Partial) == 2 * sizeof(double));
  // Freed on return while kernels still use it: torch's allocator gives it out again only behind them in the
  // stream.
  const int64_t size[] = {2 * chunks};
  const Tensor partials = torch::stable::new_empty(grads[0], {size, 1}, ScalarType::Double);
  auto [found_inf, grad_norm, grad_factor] = new_verdict(grads[0]);
  launch_check(check.tensors, element_of(check.dtype), rewrite, check.inv_scale, check.max_norm,
               static_cast<Partial*>(partials.data_ptr()),
               {static_cast<float*>(found_inf.data_ptr()), grad_norm.data_ptr(), grad_factor.data_ptr()},
               scope.stream());
  return {found_inf, grad_norm, grad_factor};
}

std::tuple<Tensor, Tensor, Tensor> unscale_and_check_cuda(const TensorList& grads,
                                                          const std::optional<Tensor>& inv_scale,
                                                          std::optional<double> max_norm) {
  return check_on_device(grads, inv_scale, max_norm, /*rewrite=*/false);
}

std::tuple<Tensor, Tensor> unscale_and_check_cuda_(const TensorList& grads,
                                                   const std::optional<Tensor>& inv_scale) {
  auto [found_inf, grad_norm, grad_factor] =
      check_on_device(grads, inv_scale, std::nullopt, /*rewrite=*/true);
  return {found_inf, grad_norm};
}

void scale_cuda_(const TensorList& grads, const Tensor& factor) {
  check_leader(grads, "grads");
  const DeviceScalar value = device_scalar(factor, "factor", grads[0], 1);
  const CudaScope scope(grads[0]);
  launch_scale(flatten({&grads}, nullptr), element_of(grads[0].scalar_type()), value, scope.stream());
}

bool cuda_kernels_run(int64_t device) {
  if (current_stream_function() == nullptr) return false;
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  return cudaSetDevice(static_cast<int>(device)) == cudaSuccess && kernels_run();
}

// Needs no GPU, so that a machine without one can test it.
bool stream_lookup_works() { return current_stream_function() != nullptr; }

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_FRAGMENT(flatout, m) { m.def("cuda_kernels_run(int device) -> bool"); }
STABLE_TORCH_LIBRARY_FRAGMENT(flatout_testing, m) { m.def("stream_lookup_works() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(flatout, CompositeExplicitAutograd, m) {
  m.impl("cuda_kernels_run", TORCH_BOX(&flatout::cuda_kernels_run));
}

STABLE_TORCH_LIBRARY_IMPL(flatout_testing, CompositeExplicitAutograd, m) {
  m.impl("stream_lookup_works", TORCH_BOX(&flatout::stream_lookup_works));
}

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("unscale_and_check", TORCH_BOX(&flatout::unscale_and_check_cuda));
  m.impl("unscale_and_check_", TORCH_BOX(&flatout::unscale_and_check_cuda_));
  m.impl("scale_", TORCH_BOX(&flatout::scale_cuda_));
}
