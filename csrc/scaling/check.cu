// check.cu: unscale + check + norm on CUDA. Each block writes one partial sum per chunk. The block that
// finishes last adds the partial sums in a fixed order, so that the norm is the same in every run.
#include "scaling/block_sum.cuh"
#include "scaling/check_chunk.h"
#include "scaling/check_launch.h"

namespace flatout {
namespace {

using Table = GradTable<>;
static_assert(sizeof(Table) + sizeof(Conclusion) + 64 <= kArgumentBytes);

template <class T, Norm kNorm, bool Rewrite>
__global__ void __launch_bounds__(kThreads)
    check_kernel(__grid_constant__ Argument<Table> table, __grid_constant__ Argument<Conclusion> conclusion,
                 uint32_t first_partial) {
  __shared__ WarpSums warps[kChunksOfBlock<T>];
  __shared__ bool last;
  const auto inverse = static_cast<compute_t<T>>(conclusion.unscaling.get());
  const uint32_t first = blockIdx.x * kChunksOfBlock<T>;
  const uint32_t count = kChunksOfBlock<T> == 1 ? 1 : min(kChunksOfBlock<T>, table.chunks() - first);
  for (uint32_t i = 0; i < count; ++i)
    keep_warp_sum<kNorm>(warps[i], check_chunk<kNorm, Rewrite, T>(view_chunk<T>(table, first + i), inverse,
                                                                  threadIdx.x, blockDim.x));
  __syncthreads();
  if (threadIdx.x < kLanes)
    for (uint32_t i = 0; i < count; ++i) {
      const Partial sum = sum_of<kNorm>(warps[i]);
      if (threadIdx.x == 0) conclusion.partials[first_partial + first + i] = sum;
    }
  if (threadIdx.x == 0) last = finishes_last(address_of(conclusion.finished), count, conclusion.chunks);
  __syncthreads();
  if (!last) return;
  constexpr uint32_t kTogether = Rewrite ? 2 : 8;  // 8 would lower occupancy: rewriting needs registers
  keep_warp_sum<kNorm>(warps[0], add_partials<kNorm, kTogether>(conclusion.partials, conclusion.chunks,
                                                                threadIdx.x, blockDim.x));
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  const Partial total = sum_of<kNorm>(warps[0]);
  if (threadIdx.x == 0) conclusion.template write<kNorm>(total);
}

// Concludes a check of gradients without elements. found_inf and the norm are 0.
__global__ void conclude_kernel(__grid_constant__ Argument<Conclusion> conclusion) {
  conclusion.write<Norm::kTwo>({0, 0});
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(__grid_constant__ Argument<Table> table, __grid_constant__ Argument<DeviceScalar> factor) {
  const auto value = static_cast<compute_t<T>>(factor.get());
  if (value == 1) return;
  scale_chunk<T>(view_chunk<T>(table, blockIdx.x), value, threadIdx.x, blockDim.x);
}

template <class T, Norm kNorm, bool Rewrite>
void launch_checks(const std::vector<FlatTensor>& tensors, const Conclusion& conclusion,
                   uint32_t first_partial, cudaStream_t stream) {
  for_each_table<Table>(tensors, [&](const Table& table) {
    const uint32_t chunks = table.chunks();
    if (chunks == 0) return;
    launch("check_kernel", check_kernel<T, kNorm, Rewrite>, check_blocks<T>(chunks), kThreads, stream, table,
           conclusion, first_partial);
    first_partial += chunks;
  });
}

}  // namespace

void launch_conclusion(const Conclusion& conclusion, cudaStream_t stream) {
  launch("conclude_kernel", conclude_kernel, 1, 1, stream, conclusion);
}

template <class T>
void launch_check(const std::vector<FlatTensor>& tensors, Norm norm, bool rewrite,
                  const Conclusion& conclusion, uint32_t first_partial, cudaStream_t stream) {
  if (rewrite) return launch_checks<T, Norm::kTwo, true>(tensors, conclusion, first_partial, stream);
  with_norm(norm, [&](auto kind) {
    launch_checks<T, decltype(kind)::value, false>(tensors, conclusion, first_partial, stream);
  });
}

template <class T>
void launch_scale(const std::vector<FlatTensor>& tensors, const DeviceScalar& factor, cudaStream_t stream) {
  for_each_table<Table>(tensors, [&](const Table& table) {
    if (table.chunks() == 0) return;
    launch("scale_kernel", scale_kernel<T>, table.chunks(), kThreads, stream, table, factor);
  });
}

template void launch_check<float>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                  cudaStream_t);
template void launch_scale<float>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<double>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                   cudaStream_t);
template void launch_scale<double>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<f16>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                cudaStream_t);
template void launch_scale<f16>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);
template void launch_check<bf16>(const std::vector<FlatTensor>&, Norm, bool, const Conclusion&, uint32_t,
                                 cudaStream_t);
template void launch_scale<bf16>(const std::vector<FlatTensor>&, const DeviceScalar&, cudaStream_t);

}  // namespace flatout
