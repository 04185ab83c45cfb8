// norms_cuda.cpp: the norm of each gradient under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "scaling/check.h"
#include "scaling/kept_counters.h"
#include "scaling/norms_launch.h"

namespace flatout {
namespace {

// Returns all gradients in order. Gradients of other dtypes are empty.
std::vector<FlatTensor> only(ScalarType dtype, const TensorList& grads) {
  std::vector<FlatTensor> flat(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].scalar_type() != dtype) continue;
    flat[i].address[0] = grads[i].data_ptr();
    flat[i].numel = grads[i].numel();
  }
  return flat;
}

Tensor grad_norms_cuda(const TensorList& grads, const std::optional<Tensor>& inv_scale, double norm_type) {
  STD_TORCH_CHECK(!grads.empty(), "grads must hold at least one tensor");
  const FlatGrads flat = flatten_grads(grads);
  const Check check = prepare_check(flat, grads[0], inv_scale, std::nullopt, norm_type);
  const CudaScope scope(grads[0]);
  const nvtx::Range range("flatout::grad_norms");
  int64_t chunks = 0;
  for (const Tensor& grad : grads) chunks += chunks_of(grad.numel());
  // Holds partials, then a counter, as in a check. Launches of several dtypes run one after another, so they
  // share the memory.
  const int64_t size[] = {2 * chunks + 1};
  const Tensor scratch = torch::stable::new_empty(grads[0], {size, 1}, ScalarType::Double);
  auto* partials = static_cast<Partial*>(scratch.data_ptr());
  const Tensor result = new_norms(check, grads);
  Norms norms{partials,
              {reinterpret_cast<uint32_t*>(partials + chunks), 0},
              check.unscaling.factor,
              result.data_ptr(),
              result.scalar_type() == ScalarType::Double,
              /*writes_empty=*/true};
  with_counter(norms.counter, grads[0], scope.stream(), [&] {
    for (const auto& [dtype, tensors] : flat) {
      with_dtype(dtype, [&]<class T>(T*) {
        launch_norms<T>(only(dtype, grads), check.norm, norms, scope.stream());
      });
      norms.writes_empty = false;
    }
  });
  return result;
}

}  // namespace
}  // namespace flatout

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) { m.impl("grad_norms", TORCH_BOX(&flatout::grad_norms_cuda)); }
