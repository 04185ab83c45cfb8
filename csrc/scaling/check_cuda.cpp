// check_cuda.cpp: unscale + check under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "scaling/check.h"
#include "scaling/check_launch.h"
#include "scaling/kept_counters.h"

namespace flatout {

namespace {

void launch_lists(const Check& check, const Conclusion& conclusion, cudaStream_t stream) {
  uint32_t first_partial = 0;
  for (const GradList& list : check.lists) {
    with_dtype(list.dtype, [&]<class T>(T*) {
      launch_check<T>(*list.tensors, check.norm, check.rewrite, conclusion, first_partial, stream);
    });
    for (const FlatTensor& tensor : *list.tensors) first_partial += chunks_of(tensor.numel);
  }
}

}  // namespace

CheckResult check_on_cuda(const Check& check, const Tensor& leader) {
  const CudaScope scope(leader);
  const nvtx::Range range(check.rewrite ? "flatout::unscale" : "flatout::check");
  uint32_t chunks = 0;
  for (const GradList& list : check.lists)
    for (const FlatTensor& tensor : *list.tensors) chunks += chunks_of(tensor.numel);
  // Holds partials, then a counter for checks without a kept counter. The memory is freed on return, while
  // kernels still use it. This is safe, because torch's allocator reuses memory in stream order.
  static_assert(sizeof(Partial) == 2 * sizeof(double) && sizeof(uint32_t) <= sizeof(double));
  const int64_t size[] = {2 * int64_t{chunks} + 1};
  const Tensor scratch = torch::stable::new_empty(leader, {size, 1}, ScalarType::Double);
  auto* partials = static_cast<Partial*>(scratch.data_ptr());
  CheckResult result = new_verdict(check, leader);
  Conclusion conclusion{partials,        chunks,         {reinterpret_cast<uint32_t*>(partials + chunks), 0},
                        check.unscaling, check.max_norm, address_of(result)};
  if (chunks == 0) {
    launch_conclusion(conclusion, scope.stream());
    return result;
  }
  with_counter(conclusion.finished, leader, scope.stream(),
               [&] { launch_lists(check, conclusion, scope.stream()); });
  return result;
}

namespace {

CheckResult unscale_and_check_cuda(const TensorList& grads, const std::optional<Tensor>& inv_scale,
                                   std::optional<double> max_norm, double norm_type) {
  const Tensor& leader = leader_of(grads, inv_scale);
  const FlatGrads flat = flatten_grads(grads);
  return check_on_cuda(prepare_check(flat, leader, inv_scale, max_norm, norm_type), leader);
}

std::tuple<Tensor, Tensor> unscale_and_check_cuda_(const TensorList& grads,
                                                   const std::optional<Tensor>& inv_scale) {
  const FlatGrads flat = flatten_grads(grads);
  const auto [found_inf, grad_norm, grad_factor] =
      check_on_cuda(prepare_rewrite(flat, grads, inv_scale), leader_of(grads, inv_scale));
  return {found_inf, grad_norm};
}

void scale_cuda_(const TensorList& grads, const Tensor& factor) {
  const FlatGrads flat = flatten_grads(grads);
  check_apart({{grads, "grads"}});
  const Tensor& leader = grads.empty() ? factor : grads[0];
  const DeviceScalar value = device_scalar(factor, "factor", leader, 1);
  const CudaScope scope(leader);
  const nvtx::Range range("flatout::scale");
  for (const auto& entry : flat)
    with_dtype(entry.first, [&]<class T>(T*) { launch_scale<T>(entry.second, value, scope.stream()); });
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("unscale_and_check", TORCH_BOX(&flatout::unscale_and_check_cuda));
  m.impl("unscale_and_check_", TORCH_BOX(&flatout::unscale_and_check_cuda_));
  m.impl("scale_", TORCH_BOX(&flatout::scale_cuda_));
}
