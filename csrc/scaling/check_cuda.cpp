// check_cuda.cpp: unscale + check, and norms, under torch's CUDA key.
#include <torch/csrc/stable/library.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/cuda_glue.h"
#include "core/nvtx.h"
#include "scaling/check.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

// Numbers of the counters in the device's code, by device and stream. One counter per stream is enough,
// because kernels of a stream run one after another. torch never destroys a stream. Whoever destroys another
// stream must wait for its work first, because a new stream may get the same handle, and so the same counter.
struct KeptCounters {
  std::mutex mutex;
  std::map<std::pair<int32_t, cudaStream_t>, uint32_t> numbers;
  uint32_t next = 0;
} kept;

// Sets the counter and calls launch(). `counter.own` is memory that only this call uses. A captured CUDA
// graph uses this memory, because a graph may be replayed on any stream, at the same time as other launches.
// So does cudaStreamPerThread, because this handle stands for one stream per host thread.
template <class Launch>
void with_counter(Counter& counter, const Tensor& leader, cudaStream_t stream, const Launch& launch) {
  if (!is_capturing(stream) && stream != cudaStreamPerThread) {
    const std::lock_guard lock(kept.mutex);  // so that launches of one stream do not mix
    const std::pair key(leader.get_device_index(), stream);
    auto entry = kept.numbers.find(key);
    if (entry == kept.numbers.end() && kept.next < kKeptCounters)
      entry = kept.numbers.emplace(key, kept.next++).first;
    if (entry != kept.numbers.end()) {
      counter = {nullptr, entry->second};
      try {
        return launch();
      } catch (...) {
        kept.numbers.erase(entry);  // the counter is possibly not 0
        throw;
      }
    }
  }
  check_cuda(cudaMemsetAsync(counter.own, 0, sizeof(*counter.own), stream), "cudaMemsetAsync");
  launch();
}

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

STABLE_TORCH_LIBRARY_IMPL(flatout, CUDA, m) {
  m.impl("unscale_and_check", TORCH_BOX(&flatout::unscale_and_check_cuda));
  m.impl("unscale_and_check_", TORCH_BOX(&flatout::unscale_and_check_cuda_));
  m.impl("grad_norms", TORCH_BOX(&flatout::grad_norms_cuda));
  m.impl("scale_", TORCH_BOX(&flatout::scale_cuda_));
}
